"""Log-probabilities of given tokens from hidden states: a few rows of logits at a time, never all of them.

Shapes: N tokens, D width, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from stages.modeling.cpu_kernels.bindings import call
from stages.modeling.cpu_kernels.build import takes
from stages.modeling.packed.forward import chunks_by_length, packed_hidden_states
from stages.modeling.packed.sequences import pack_responses, rounded
from stages.runtime.progress import Progress

CHUNK_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}  # at a time: on a CPU what fits its cache
LEAST_CHUNK_TOKENS = 128


def selective_log_softmax(
    layer: nn.Module,
    hidden: torch.Tensor,
    chosen: torch.Tensor,
    temperature: float,
    kept: torch.Tensor | None = None,
) -> torch.Tensor:
    """Log-probability [N] fp32 of the tokens `chosen` [N], softmax(layer(hidden) / temperature), hidden [N, D].

    kept: ids [N, K] that the softmax is restricted to, see filtering.py.

    A frozen linear layer's gradient for `hidden` is known as soon as the logits are: it is made at once, and no logits
    are kept or made anew. A layer that learns is computed again, chunk by chunk, in the backward pass.
    """
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    frozen = type(layer) is nn.Linear and not weight.requires_grad and (bias is None or not bias.requires_grad)
    parts = []
    size = chunk_tokens(layer, hidden.device)
    for first in range(0, len(chosen), size):
        part, tokens = slice(first, first + size), chosen[first : first + size]
        if frozen and kept is None:
            parts.append(_FrozenLayer.apply(hidden[part], weight, bias, tokens, temperature))
        else:
            among = None if kept is None else kept[part]
            parts.append(checkpoint(_chosen, layer, hidden[part], tokens, temperature, among, use_reentrant=False))
    return torch.cat(parts) if parts else hidden.new_zeros(0, dtype=torch.float32)


def chunk_tokens(layer: nn.Module, where: torch.device) -> int:
    """Tokens whose logits are in memory at once."""
    vocabulary = getattr(layer, "token_adapter", layer).out_features  # PEFT's wrapper of trained rows has no size
    return max(LEAST_CHUNK_TOKENS, CHUNK_LOGITS[where.type] // vocabulary)


def _chosen(layer: nn.Module, hidden, chosen, temperature: float, kept: torch.Tensor | None) -> torch.Tensor:
    logits = layer(hidden).float() / temperature
    if kept is not None:
        return chosen_among(logits, kept, chosen)
    return -functional.cross_entropy(logits, chosen, reduction="none")


def _softmax(logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [N] of `chosen` [N] by the first rows of logits, [N or more, V]; these become their softmax."""
    rows = logits[: len(chosen)]
    if takes(logits):
        found = torch.empty(len(rows))
        call("softmax", rows, rows, chosen.contiguous(), found, *rows.shape)
        return found
    picked = rows.sub_(rows.amax(-1, keepdim=True)).gather(-1, chosen[:, None])
    total = rows.exp_().sum(-1, keepdim=True)
    rows.div_(total)
    return (picked - total.log()).squeeze(-1)


class _FrozenLayer(torch.autograd.Function):
    """d log p / d hidden = (W[chosen] - softmax @ W) / temperature, made in the forward pass."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, chosen, temperature: float):
        tokens = len(chosen)
        states = functional.pad(hidden, (0, 0, 0, rounded(tokens) - tokens))
        dtype = weight.dtype
        if torch.is_autocast_enabled(hidden.device.type):
            dtype = torch.get_autocast_dtype(hidden.device.type)
        weight = weight.to(dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            logits = functional.linear(states.to(dtype), weight, None if bias is None else bias.to(dtype)).float()
            logits = logits if temperature == 1 else logits.div_(temperature)
            found = _softmax(logits, chosen)
            if ctx.needs_input_grad[0]:
                expected = logits.to(dtype) @ weight
                ctx.save_for_backward((weight[chosen] - expected[:tokens]).to(hidden.dtype).div_(temperature))
        return found

    @staticmethod
    def backward(ctx, gradient):
        (slope,) = ctx.saved_tensors
        return gradient[:, None].to(slope.dtype) * slope, None, None, None, None

FORWARD_TOKENS = 8192  # in one forward pass: bounds its memory


@torch.no_grad()
def response_logprobs(
    model, prompts: list[list[int]], responses: list[list[int]], temperature: float, label: str | None = None
) -> list[torch.Tensor]:
    """Log-probability, in nats, of each response token given what stands before it: 1-D fp32 on the CPU, one a row.

    label: of the progress shown; None: none is.
    """
    progress = Progress(label, len(prompts), "texts") if label else None
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    found: list = [None] * len(prompts)
    for chunk in chunks_by_length(lengths, max(1, FORWARD_TOKENS // max(lengths, default=1))):
        texts = pack_responses([prompts[i] for i in chunk], [responses[i] for i in chunk], model.device)
        hidden = packed_hidden_states(model, texts.batch, texts.before)
        log_p = selective_log_softmax(model.get_output_embeddings(), hidden, texts.chosen, temperature).cpu()
        for i, scores in zip(chunk, log_p.split([len(responses[i]) for i in chunk]), strict=True):
            found[i] = scores
        if progress:
            progress.advance(len(chunk))
    if progress:
        progress.finish()
    return found


def logprobs_among(scores: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [M, K] of the kept tokens, summing up to 1, from any logits [M, V]; -inf where kept is -1."""
    return scores.gather(-1, kept.clamp(min=0)).masked_fill(kept < 0, float("-inf")).log_softmax(-1)


def chosen_among(scores: torch.Tensor, kept: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Log-probability [M] of `chosen` [M], one of the kept."""
    place = (kept == chosen[:, None]).int().argmax(-1, keepdim=True)
    return logprobs_among(scores, kept).gather(-1, place).squeeze(-1)
