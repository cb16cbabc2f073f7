"""The objectives, as pure functions of tensors and numbers.

Shapes: [B] pairs or rows; [B, R] rows by response tokens. `mask` is 1.0 at response tokens, 0.0 elsewhere.
"""

import torch
from torch.nn import functional


def pairwise_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """-log sigmoid(r_j - r_k), a scalar mean over pairs [B]; ln 2 when scores tie (InstructGPT eq. 1)."""
    return -functional.logsigmoid(better - worse).mean()


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the response tokens; whatever stands elsewhere (even inf) has no part in it."""
    return torch.where(mask.bool(), values, 0.0).sum()


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the response tokens of all rows."""
    return masked_sum(values, mask) / mask.sum()


def policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """Per token: max(-A r, -A clip(r, 1-e, 1+e)) [B, R] (PPO, arXiv 1707.06347, eq. 7, negated)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float
) -> torch.Tensor:
    """Per token: half the larger of the squared errors, unclipped and clipped around the old value [B, R]."""
    clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
    return 0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2)


def kl_k1(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) a token, sampled from p: log p - log q. Unbiased, signed (Schulman, "Approximating KL divergence")."""
    return log_p - log_q


def kl_k3(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """KL(p || q) a token, sampled from p: r - 1 - log r with r = q/p. Unbiased, never negative (same source)."""
    log_ratio = log_q - log_p
    return log_ratio.exp() - 1 - log_ratio
