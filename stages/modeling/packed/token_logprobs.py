"""Log-probabilities of tokens from hidden states, computed a few rows of logits at a time.

Shapes: N tokens, D width, V vocabulary.
"""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from stages.distributed import group
from stages.modeling.cpu_kernels.build import call, supports
from stages.modeling.output_layer import output_layer
from stages.modeling.packed.forward import FORWARD_TOKENS, own_chunks, packed_hidden_states, uses_cpu_kernels
from stages.modeling.packed.sequences import round_up_tokens, scatter_to_rows
from stages.modeling.packed.shared_prefix import pack_rows, row_lengths
from stages.modeling.torch_setup import product_dtype, without_autocast

# In memory at once; on a CPU what fits its cache.
CHUNK_LOGITS = {"cpu": 1 << 19, "cuda": 1 << 26}
MIN_CHUNK_TOKENS = 128


def selective_log_softmax(
    layer: nn.Module,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    temperature: float,
    cpu_kernels: bool = False,
) -> torch.Tensor:
    """Compute log softmax(layer(hidden) / temperature) at `token_ids` [N], in nats: [N] fp32.

    A frozen linear layer's gradient for `hidden` [N, D] is computed together with the logits, which are then dropped.
    A layer that learns is computed again, chunk by chunk, in the backward pass.

    Args:
        cpu_kernels: use the CPU kernel where it supports the logits (see `uses_cpu_kernels`).
    """
    weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
    frozen = type(layer) is nn.Linear and not weight.requires_grad and (bias is None or not bias.requires_grad)
    chunks = []
    size = logits_chunk_tokens(layer, hidden.device)
    for first in range(0, len(token_ids), size):
        span, ids = slice(first, first + size), token_ids[first : first + size]
        if frozen:
            chunks.append(_FrozenLayer.apply(hidden[span], weight, bias, ids, temperature, cpu_kernels))
        else:
            chunks.append(checkpoint(_logprobs, layer, hidden[span], ids, temperature, use_reentrant=False))
    return torch.cat(chunks) if chunks else hidden.float().sum(-1)  # no token, but the graph of the forward pass


def logprobs_from_hidden(
    model: PreTrainedModel, hidden: torch.Tensor, token_ids: torch.Tensor, temperature: float = 1.0
) -> torch.Tensor:
    """Compute the log-probabilities of `token_ids` [N], in nats, from a causal model's last hidden states: [N] fp32."""
    return selective_log_softmax(output_layer(model), hidden, token_ids, temperature, uses_cpu_kernels(model))


def entropy(probabilities: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """Compute the entropy of distributions over the last dimension, in nats; a logit of -inf adds 0 (0 log 0 is 0)."""
    return -(probabilities * logprobs.clamp(min=torch.finfo(logprobs.dtype).min)).sum(-1)


def logits_chunk_tokens(layer: nn.Module, device: torch.device) -> int:
    """Return the number of tokens whose logits are in memory at once."""
    return max(MIN_CHUNK_TOKENS, CHUNK_LOGITS[device.type] // layer.out_features)


def _logprobs(layer: nn.Module, hidden, token_ids, temperature: float) -> torch.Tensor:
    return -functional.cross_entropy(layer(hidden).float() / temperature, token_ids, reduction="none")


def _softmax_(logits: torch.Tensor, token_ids: torch.Tensor, cpu_kernels: bool) -> torch.Tensor:
    """Return the log-probabilities [N] of `token_ids` [N]; the first N rows of `logits` become their softmax."""
    rows = logits[: len(token_ids)]
    if cpu_kernels and supports(logits):
        logprobs = torch.empty(len(rows))
        call("log_softmax", rows, rows, token_ids.contiguous(), logprobs, *rows.shape)
        return logprobs
    picked = rows.sub_(rows.amax(-1, keepdim=True)).gather(-1, token_ids[:, None])
    total = rows.exp_().sum(-1, keepdim=True)
    rows.div_(total)
    return (picked - total.log()).squeeze(-1)


class _FrozenLayer(torch.autograd.Function):
    """Log-probabilities under a frozen layer; d log p / d hidden = (W[token] - softmax @ W) / temperature."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, token_ids, temperature: float, cpu_kernels: bool):
        tokens = len(token_ids)
        states = functional.pad(hidden, (0, 0, 0, round_up_tokens(tokens) - tokens))
        dtype = product_dtype(weight)
        weight = weight.to(dtype)
        with without_autocast(hidden):
            logits = functional.linear(states.to(dtype), weight, None if bias is None else bias.to(dtype)).float()
            logits = logits if temperature == 1 else logits.div_(temperature)
            logprobs = _softmax_(logits, token_ids, cpu_kernels)
            if ctx.needs_input_grad[0]:
                expected = logits.to(dtype) @ weight
                ctx.save_for_backward((weight[token_ids] - expected[:tokens]).to(hidden.dtype).div_(temperature))
        return logprobs

    @staticmethod
    def backward(ctx, grad_logprobs):
        (derivative,) = ctx.saved_tensors
        return grad_logprobs[:, None].to(derivative.dtype) * derivative, None, None, None, None, None


@torch.no_grad()
def response_logprobs(
    model, prompts: list[list[int]], responses: list[list[int]], temperature: float, label: str | None = None
) -> list[torch.Tensor]:
    """Compute the log-probability, in nats, of each response token: one fp32 tensor per response, on the CPU.

    A prompt that comes several times in a forward pass is computed once. The rows are shared among the processes.
    label: name of the progress line, in tokens; None shows none.
    """
    lengths = row_lengths(prompts, responses, share_prompts=True)
    logprobs = [torch.zeros(len(response)) for response in responses]
    for chunk in own_chunks(lengths, max_tokens=FORWARD_TOKENS, label=label):
        packed = pack_rows([prompts[i] for i in chunk], [responses[i] for i in chunk], model.device, share_prompts=True)
        hidden = packed_hidden_states(model, packed.batch, packed.predictor_positions)
        flat = logprobs_from_hidden(model, hidden, packed.token_ids, temperature)
        for i, row in zip(chunk, scatter_to_rows(flat, packed).cpu(), strict=True):
            logprobs[i] = row[: len(responses[i])]
    if group.world_size() > 1 and logprobs:
        logprobs = list(group.sum_tensor(torch.cat(logprobs)).split([len(response) for response in responses]))
    return logprobs
