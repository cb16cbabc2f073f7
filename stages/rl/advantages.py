"""From scores to advantages. Shapes: [B, R] rows by response tokens; `mask` is 1.0 at response tokens."""

from typing import Literal

import torch

from stages.rl.losses import masked_mean, masked_sum


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Generalised advantage estimates [B, R]; the value after the last token is 0 (arXiv 1506.02438, eq. 16)."""
    values = torch.where(mask.bool(), values, 0.0)
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(following)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = torch.where(mask[:, t].bool(), delta + gamma * lam * following, 0.0)
        advantages[:, t] = following
    return advantages


def whiten(
    values: torch.Tensor,
    mask: torch.Tensor,
    *,
    variance: Literal["biased", "unbiased"] = "biased",
    keep_mean: bool = False,
) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over the response tokens (eps 1e-8 under the root); 0 elsewhere.

    variance: 'unbiased' divides by one token less, as TRL. keep_mean: the mean stays as it was, as rewards need it.
    Fewer than two tokens have no spread: they are only centred.
    """
    mean, tokens = masked_mean(values, mask), mask.sum()
    whitened = values - mean
    if tokens > 1:
        freedom = tokens if variance == "biased" else tokens - 1
        whitened = whitened * torch.rsqrt(masked_sum(whitened**2, mask) / freedom + 1e-8)
    return torch.where(mask.bool(), whitened + mean if keep_mean else whitened, 0.0)
