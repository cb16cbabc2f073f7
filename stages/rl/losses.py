"""Compute losses per token. Shapes: [B, R], B responses by R tokens; masks are 1.0 at response tokens."""

import torch


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the response tokens; other entries, even inf, are ignored."""
    return torch.where(mask.bool(), x, 0.0).sum()


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average over the response tokens of all rows."""
    return masked_sum(x, mask) / mask.sum()


def policy_loss(ratio: torch.Tensor, advantages: torch.Tensor, clip_range: float) -> torch.Tensor:
    """Compute max(-A r, -A clip(r, 1 - e, 1 + e)) per token (PPO, arXiv 1707.06347, eq. 7, negated)."""
    return torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - clip_range, 1 + clip_range))


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Compute half the squared error per token, or that of the value clipped around the old one where it is larger.

    clip_range: None does not clip.
    """
    errors = (values - returns) ** 2
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors
