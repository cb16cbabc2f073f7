"""Sample one token from logits at a temperature. Shapes: B rows, V vocabulary."""

from typing import NamedTuple

import torch

from stages.modeling.packed.token_logprobs import entropy
from stages.modeling.torch_setup import allow_nondeterministic


class SampledTokens(NamedTuple):
    """The tokens of one step with their log-probabilities and entropies, all [B]."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor


def sample_token(logits: torch.Tensor, temperature: float, uniform: torch.Tensor) -> SampledTokens:
    """Sample one token per row from logits [B, V] by inverting the CDF at `uniform` [B].

    The cumulative sum over the vocabulary is in float64, since fp32 rounds it.
    """
    logits = logits if temperature in (0, 1) else logits / temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    probabilities = logprobs.exp()
    if temperature == 0:
        indices = logprobs.argmax(-1, keepdim=True)
    else:
        with allow_nondeterministic():  # of one row, a GPU's sums may differ in the last of 53 bits
            cumulative = probabilities.cumsum(-1, dtype=torch.float64)
        indices = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
        indices = indices.clamp(max=logprobs.shape[-1] - 1)
    return SampledTokens(indices.squeeze(-1), logprobs.gather(-1, indices).squeeze(-1),
                         entropy(probabilities, logprobs))
