"""Compute losses per token, as pure functions, and the weights that correct them for the sampler's rounding.

Tokens are drawn by decoding step by step, and old log-probabilities come from a forward pass. In fp32, and in bf16
with the CPU kernels, both agree. Elsewhere they differ by rounding, so that the responses come from another
distribution than the one that the update assumes. Weights of old to sampled probability correct its expectation; they
are truncated, because one large weight would be most of a minibatch's gradient (truncated importance sampling: Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008).

Shapes: [B, R], B responses by R tokens; masks are 1.0 at response tokens.
"""

from typing import Literal

import torch

from stages.rewards.kl import kl_k3
from stages.rl.trajectory import Trajectory

RatioLevel = Literal["token", "sequence"]
LossMean = Literal["token", "sequence"]


def masked_sum(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum over the response tokens; other entries, even inf, are ignored."""
    return torch.where(mask.bool(), x, 0.0).sum()


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Average over the response tokens of all rows."""
    return masked_sum(x, mask) / mask.sum()


def sum_means(x: torch.Tensor, mask: torch.Tensor, loss_mean: LossMean) -> torch.Tensor:
    """Sum what a loss averages: x at every response token ('token'), or its mean over each response ('sequence')."""
    if loss_mean == "token":
        return masked_sum(x, mask)
    return (torch.where(mask.bool(), x, 0.0).sum(-1) / mask.sum(-1)).sum()


def probability_ratio(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor, level: RatioLevel
) -> torch.Tensor:
    """Compute new / old probability: of each token, or of its whole response ('sequence'); 1 outside the mask.

    A response's ratio is the product of its tokens' ratios, as in RLOO (arXiv 2402.14740; TRL's RLOOTrainer).
    """
    log_ratio = torch.where(mask.bool(), logprobs - old_logprobs, 0.0)
    return (log_ratio if level == "token" else _sum_responses(log_ratio, mask)).exp()


def kl_in_loss(
    logprobs: torch.Tensor, ref_logprobs: torch.Tensor, old_logprobs: torch.Tensor, mask: torch.Tensor,
    level: RatioLevel, *, importance_weight: bool
) -> torch.Tensor:
    """Estimate the KL to the reference by k3 (arXiv 2402.03300, eq. 4): of each token, or of its response ('sequence').

    importance_weight: multiply by the token's ratio of new to old probability, so that the gradient is that of the
    token's KL (arXiv 2512.02556).
    """
    kl = kl_k3(logprobs, ref_logprobs)
    if importance_weight:
        kl = kl * probability_ratio(logprobs, old_logprobs, mask, "token")
    return kl if level == "token" else _sum_responses(kl, mask)


def _sum_responses(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each response token the sum over its response, and 0 outside the mask."""
    return torch.where(mask.bool(), x, 0.0).sum(-1, keepdim=True) * mask


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


def sampler_weights(
    old_logprobs: torch.Tensor, sampler_logprobs: torch.Tensor, mask: torch.Tensor, level: RatioLevel, largest: float
) -> torch.Tensor:
    """Compute min(old / sampler's probability, `largest`) of each token, or of its whole response; 1 outside the mask.
    """
    return probability_ratio(old_logprobs, sampler_logprobs, mask, level).clamp(max=largest)


def minibatch_weights(
    trajectory: Trajectory, rows: torch.Tensor, mask: torch.Tensor, level: RatioLevel, largest: float | None
) -> torch.Tensor | float:
    """Compute the `sampler_weights` of some rows [b], with their mask [b, columns in use]; 1 where `largest` is None or
    nothing is to correct.
    """
    if trajectory.sampler_logprobs is None or largest is None:
        return 1.0
    old, sampled = (x[rows, : mask.shape[1]] for x in (trajectory.logprobs, trajectory.sampler_logprobs))
    return sampler_weights(old, sampled, mask, level, largest)


def sampler_metrics(trajectory: Trajectory, level: RatioLevel, largest: float | None) -> dict[str, float]:
    """Summarise how old and sampler's log-probabilities differ, by metric name; empty where they are the same."""
    if trajectory.sampler_logprobs is None:
        return {}
    difference = (trajectory.logprobs - trajectory.sampler_logprobs).abs()
    metrics = {"sampler_logprob_difference": float(masked_mean(difference, trajectory.mask))}
    if largest is None:
        return metrics
    weights = sampler_weights(trajectory.logprobs, trajectory.sampler_logprobs, trajectory.mask, level, largest)
    return metrics | {"sampler_weight": float(masked_mean(weights, trajectory.mask)),
                      "sampler_weight_truncated": float(masked_mean((weights == largest).float(), trajectory.mask))}
