"""Sample one token from logits: temperature, top-k, top-p. Shapes: B rows, V vocabulary, K allowed token ids."""

from typing import NamedTuple

import torch

from stages.modeling.packed.token_logprobs import entropy, restricted_log_softmax
from stages.modeling.torch_setup import allow_nondeterministic


class SampledTokens(NamedTuple):
    """The tokens of one step with their log-probabilities and entropies, all [B], and the allowed ids [B, K]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    allowed_token_ids: torch.Tensor | None


def sample_token(
    logits: torch.Tensor, temperature: float, uniform: torch.Tensor, top_k: int, top_p: float
) -> SampledTokens:
    """Sample one token per row from logits [B, V] by inverting the CDF at `uniform` [B].

    The cumulative sum over the vocabulary is in float64, since fp32 rounds it.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    ids = allowed_token_ids(logprobs, top_k, top_p) if top_k else None
    logprobs = logprobs if ids is None else restricted_log_softmax(logprobs, ids)
    probabilities = logprobs.exp()
    if temperature == 0:
        indices = logprobs.argmax(-1, keepdim=True)
    else:
        with allow_nondeterministic():  # of one row, a GPU's sums may differ in the last of 53 bits
            cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        indices = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        indices = indices.clamp(max=logprobs.shape[-1] - 1)
    tokens = indices if ids is None else ids.gather(-1, indices)
    return SampledTokens(tokens.squeeze(-1), logprobs.gather(-1, indices).squeeze(-1),
                         entropy(probabilities, logprobs), ids)


def allowed_token_ids(logprobs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Apply top-k, then top-p within the k, to log-probabilities [B, V]; return the ids [B, K], padded with -1.

    Top-p keeps the fewest likeliest tokens that hold `top_p` of the top k's probability, and at least one.
    """
    likeliest = logprobs.topk(min(top_k, logprobs.shape[-1]), dim=-1)
    probabilities = likeliest.values.softmax(-1)
    with allow_nondeterministic():
        before = probabilities.cumsum(-1) - probabilities
    return torch.where(before < top_p, likeliest.indices, -1)
