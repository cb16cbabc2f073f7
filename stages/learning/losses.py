"""The objectives, as pure functions of tensors and numbers.

Shapes: [B] pairs or rows; [B, R] rows by response tokens. `mask` is 1.0 at response tokens, 0.0 elsewhere.
"""

import torch
from torch.nn import functional


def pairwise_losses(
    better: torch.Tensor,
    worse: torch.Tensor,
    margins: torch.Tensor | float = 0.0,
    label_smoothing: float = 0.0,
    centring: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(r_j - r_k - margin) of each pair, all [B] (InstructGPT eq. 1; margins: Llama 2, eq. 2).

    ln 2 when scores tie and there is no margin. label_smoothing: the share of pairs held to be the wrong way round
    (conservative loss, Mitchell 2023). centring: times (r_j + r_k)^2, which keeps scores around 0 (Eisenstein et al.
    2023, as in TRL).
    """
    gap = better - worse - margins
    losses = -functional.logsigmoid(gap)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * functional.logsigmoid(-gap)
    return losses + centring * (better + worse) ** 2


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
