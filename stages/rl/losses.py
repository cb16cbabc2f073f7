"""The objectives, as pure functions of tensors and numbers.

Shapes: [B] pairs or rows; [B, R] rows by response tokens. `mask` is 1.0 at response tokens, 0.0 elsewhere.
"""

import torch


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
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip_range: float | None
) -> torch.Tensor:
    """Per token: half the larger of the squared errors, unclipped and clipped around the old value [B, R].

    clip_range: None leaves half the squared error.
    """
    errors = (values - returns) ** 2
    if clip_range is not None:
        clipped = old_values + (values - old_values).clamp(-clip_range, clip_range)
        errors = torch.maximum(errors, (clipped - returns) ** 2)
    return 0.5 * errors
