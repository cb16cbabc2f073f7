"""Run steps 2 to 4 of PolicyGradientTrainer.step on a given rollout.

test_policy_gradient_trainer.py checks that `step` does the same.
"""

import torch

from stages.generation.rollout import Rollout
from stages.rewards.kl import kl_penalised_rewards
from stages.rl.advantages import gae_advantages
from stages.rl.policy import Policy
from stages.rl.trajectory import Trajectory, score_rollout


def build_trajectory(
    policy: Policy,
    rollout: Rollout,
    rewards: torch.Tensor,
    beta: float,
    *,
    forward_prompts: int = 8,
    reuse_rollout_logprobs: bool = False,
    kl_estimator: str = "k1",
    gamma: float = 1.0,
    gae_lambda: float = 0.95,
    **conventions,
) -> Trajectory:
    """Score the rollout, penalise rewards [B] and estimate advantages; conventions: of `gae_advantages`."""
    scores = score_rollout(policy, rollout, forward_prompts, reuse_rollout_logprobs)
    token_rewards = kl_penalised_rewards(
        rewards.to(scores.logprobs), scores.logprobs, scores.ref_logprobs, scores.mask, beta, kl_estimator)
    advantages = gae_advantages(
        token_rewards, scores.values, scores.mask, gamma=gamma, gae_lambda=gae_lambda, **conventions)
    return Trajectory.from_scores(rollout, scores, *advantages, reuse_rollout_logprobs)
