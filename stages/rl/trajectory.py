"""A rollout with all that an update needs: log-probabilities, values, advantages. Shapes: [B, R] rows by tokens."""

from dataclasses import dataclass

import torch

from stages.generation.rollout import Rollout
from stages.modeling.packed.forward import chunks_by_length
from stages.rl.advantages import gae, whiten
from stages.rl.kl import kl_penalised_rewards
from stages.rl.policy import Policy


@dataclass(frozen=True)
class Update:
    """Numbers of an update; see the recipe's section ppo. The last five are as there by default."""

    epochs: int
    minibatch_prompts: int
    microbatch_prompts: int
    gamma: float
    gae_lambda: float
    clip_range: float
    value_clip_range: float | None
    value_coefficient: float
    max_gradient_norm: float | None
    max_ratio: float
    update_kl_limit: float | None
    forward_prompts: int = 8
    kl_estimator: str = "k1"
    advantage_variance: str = "biased"
    whiten_rewards: bool = False


@dataclass(frozen=True)
class RolloutScores:
    """A rollout batch under policy, reference and value head; tensors are [B, R], fp32, and 0 outside the mask."""

    log_p: torch.Tensor
    log_ref: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    def sequence_kl(self) -> float:
        """KL(policy || reference), k1, summed over a response, mean over responses, in nats."""
        return float(((self.log_p - self.log_ref) * self.mask).sum(-1).mean())


@dataclass(frozen=True)
class Trajectory(RolloutScores):
    """What the update learns from."""

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: torch.Tensor
    returns: torch.Tensor
    kept: torch.Tensor | None = None

    def explained_variance(self) -> float:
        """1 - Var(returns - values) / Var(returns): 1 for a perfect value function, 0 for a constant one."""
        inside = self.mask.bool()
        returns, values = self.returns[inside], self.values[inside]
        return float(1 - (returns - values).var() / returns.var().clamp(min=1e-8))


@torch.no_grad()
def score_rollout(policy: Policy, rollout: Rollout, forward_prompts: int, keep_rollout_log_p: bool = False) -> RolloutScores:
    """Score a rollout under policy, reference and value head, `forward_prompts` rows at a time, like lengths together.

    keep_rollout_log_p: take the sampler's log-probabilities and values; only where startup.py found them equal to a
    forward pass in the shapes of the update.
    """
    keep = keep_rollout_log_p and rollout.log_p is not None
    lengths = [len(prompt) + len(response) for prompt, response in zip(rollout.prompts, rollout.responses, strict=True)]
    columns = max(map(len, rollout.responses))
    found = torch.zeros(4, len(lengths), columns, device=policy.model.device)
    for rows in chunks_by_length(lengths, forward_prompts):
        texts = [rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows], kept_of(rollout, rows)
        log_ref = policy.reference(*texts)
        if keep:
            log_p, values = rollout.log_p[rows], rollout.values[rows]
            mask = torch.arange(columns) < torch.tensor([[len(response)] for response in texts[1]])
        else:
            log_p, values, mask = policy(*texts)
        for number, part in enumerate((log_p, log_ref, values, mask)):
            found[number, rows, : part.shape[1]] = part.to(found)
    return RolloutScores(*found)


def kept_of(rollout: Rollout | Trajectory, rows: list[int]) -> torch.Tensor | None:
    """The tokens that these rows' responses were drawn among, if a filter was on."""
    return None if rollout.kept is None else rollout.kept[rows]


def build_trajectory(
    policy: Policy,
    rollout: Rollout,
    scores: torch.Tensor,
    beta: float,
    update: Update,
    keep_rollout_log_p: bool = False,
) -> Trajectory:
    """Look at a rollout, and estimate the advantages of its tokens from scores [B] and the KL penalty."""
    seen = score_rollout(policy, rollout, update.forward_prompts, keep_rollout_log_p)
    rewards = kl_penalised_rewards(scores.to(seen.log_p), seen.log_p, seen.log_ref, seen.mask, beta, update.kl_estimator)
    if update.whiten_rewards:
        rewards = whiten(rewards, seen.mask, variance=update.advantage_variance, keep_mean=True)
    advantages = gae(rewards, seen.values, seen.mask, update.gamma, update.gae_lambda)
    return Trajectory(
        **vars(seen),
        prompts=rollout.prompts,
        responses=rollout.responses,
        advantages=whiten(advantages, seen.mask, variance=update.advantage_variance),
        returns=advantages + seen.values,
        kept=rollout.kept,
    )
