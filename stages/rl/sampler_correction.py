"""Correct the policy loss where the sampler's probabilities are not the old ones.

Tokens are drawn by decoding step by step, and old log-probabilities come from a forward pass. In fp32, and in bf16
with the CPU kernels, both agree. Elsewhere they differ by rounding, so that the responses come from another
distribution than the one that the update assumes. Weights of old to sampled probability correct its expectation; they
are truncated, because one large weight would be most of a minibatch's gradient (truncated importance sampling: Yao et
al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; Ionides 2008).

Shapes: [B, R], B responses by R tokens.
"""

import torch

from stages.rl.losses import RatioLevel, masked_mean, probability_ratio
from stages.rl.trajectory import Trajectory


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
