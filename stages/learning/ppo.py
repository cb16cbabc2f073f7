"""One PPO iteration on given rollouts: experience, then several epochs of clipped minibatch updates.

PPO as in "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593) with the details of "The N
Implementation Details of RLHF with PPO". Shapes: [B, R] rows by response tokens.
"""

from dataclasses import dataclass

import torch

from stages.learning import losses
from stages.learning.advantages import gae, token_rewards, whiten
from stages.learning.policy import Policy
from stages.learning.rollout import Rollout


@dataclass(frozen=True)
class Update:
    """Numbers of the update; see the recipe's section ppo."""

    epochs: int
    minibatch_prompts: int
    microbatch_prompts: int
    gamma: float
    gae_lambda: float
    clip_range: float
    value_clip_range: float
    value_coefficient: float
    max_gradient_norm: float
    max_ratio: float
    update_kl_limit: float | None


@dataclass(frozen=True)
class Experience:
    """A rollout batch with all that the update needs; tensors are [B, R] and hold 0 outside the mask."""

    prompts: list[list[int]]
    responses: list[list[int]]
    log_p: torch.Tensor
    log_ref: torch.Tensor
    values: torch.Tensor
    entropy: torch.Tensor
    mask: torch.Tensor
    advantages: torch.Tensor
    returns: torch.Tensor

    def sequence_kl(self) -> float:
        """KL(policy || reference), k1, summed over a response, mean over responses, in nats."""
        return float(((self.log_p - self.log_ref) * self.mask).sum(-1).mean())

    def mean_entropy(self) -> float:
        """Of the policy's distribution at a response token, in nats."""
        return float(losses.masked_mean(self.entropy, self.mask))

    def explained_variance(self) -> float:
        """1 - Var(returns - values) / Var(returns): 1 for a perfect value function, 0 for a constant one."""
        inside = self.mask.bool()
        returns, values = self.returns[inside], self.values[inside]
        return float(1 - (returns - values).var() / returns.var().clamp(min=1e-8))


@torch.no_grad()
def experience(policy: Policy, rollout: Rollout, scores: torch.Tensor, beta: float, update: Update) -> Experience:
    """Score a rollout [B] under policy, reference and value head in the shapes of the update; whitened advantages."""
    columns = max(map(len, rollout.responses))
    parts = []
    for start in range(0, len(rollout.prompts), update.microbatch_prompts):
        rows = slice(start, start + update.microbatch_prompts)
        scored = policy(rollout.prompts[rows], rollout.responses[rows])
        reference = policy.reference(rollout.prompts[rows], rollout.responses[rows])
        parts.append([_widened(x * scored.mask, columns) for x in (*scored, reference)])
    log_p, values, entropy, mask, log_ref = (torch.cat(column) for column in zip(*parts, strict=True))
    rewards = token_rewards(scores.to(log_p.device), log_p, log_ref, mask, beta)
    advantages = gae(rewards, values, mask, update.gamma, update.gae_lambda)
    return Experience(
        rollout.prompts,
        rollout.responses,
        log_p,
        log_ref,
        values,
        entropy,
        mask,
        whiten(advantages, mask),
        advantages + values,
    )


def ppo_epochs(
    policy: Policy, optimizer: torch.optim.Optimizer, seen: Experience, update: Update, generator: torch.Generator
) -> dict[str, float]:
    """All epochs over one experience: every response once an epoch, in a fresh order. Returns statistics.

    Stops early when the policy has moved `update_kl_limit` nats a token from the rollout's; skips, and counts, a
    minibatch whose mean ratio is above `max_ratio` or whose gradient is not finite.
    """
    log: list[dict[str, float]] = []
    for _ in range(update.epochs):
        order = torch.randperm(len(seen.prompts), generator=generator)
        for rows in order.split(update.minibatch_prompts):
            log.append(_minibatch_step(policy, optimizer, seen, rows, update))
            if update.update_kl_limit is not None and log[-1]["update_kl"] > update.update_kl_limit:
                return _summary(log, stopped=True)
    return _summary(log, stopped=False)


def _minibatch_step(
    policy: Policy, optimizer, seen: Experience, rows: torch.Tensor, update: Update
) -> dict[str, float]:
    """One optimiser step; gradients of the microbatches add up to the minibatch's, normalised by its tokens."""
    optimizer.zero_grad(set_to_none=True)
    tokens = float(seen.mask[rows].sum())
    totals: dict[str, float] = {}
    for part in rows.split(update.microbatch_prompts):
        loss, sums = _microbatch_loss(policy, seen, part, tokens, update)
        loss.backward()
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value / tokens
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    norm = float(torch.nn.utils.clip_grad_norm_(parameters, update.max_gradient_norm))
    skipped = totals["ratio"] > update.max_ratio or norm != norm or norm == float("inf")
    if not skipped:
        optimizer.step()
    return totals | {"gradient_norm": norm, "skipped": float(skipped)}


def _microbatch_loss(policy: Policy, seen: Experience, rows: torch.Tensor, tokens: float, update: Update):
    """Loss of some rows as their share of the minibatch's token mean, and sums over their tokens."""
    index = rows.tolist()
    scored = policy([seen.prompts[i] for i in index], [seen.responses[i] for i in index])
    width = scored.mask.shape[1]
    old_log_p, old_values, advantages, returns = (
        x[rows, :width] for x in (seen.log_p, seen.values, seen.advantages, seen.returns)
    )
    log_ratio = torch.where(scored.mask.bool(), scored.log_p - old_log_p, 0.0)
    ratio = log_ratio.exp()
    policy_part = losses.masked_sum(losses.policy_loss(ratio, advantages, update.clip_range), scored.mask)
    value_part = losses.masked_sum(
        losses.value_loss(scored.values, old_values, returns, update.value_clip_range), scored.mask
    )
    with torch.no_grad():
        outside = ((ratio - 1).abs() > update.clip_range).float()
        sums = {
            "policy_loss": policy_part,
            "value_loss": value_part,
            "ratio": losses.masked_sum(ratio, scored.mask),
            "clip_fraction": losses.masked_sum(outside, scored.mask),
            "update_kl": losses.masked_sum(ratio - 1 - log_ratio, scored.mask),
        }
    loss = (policy_part + update.value_coefficient * value_part) / tokens
    return loss, {name: float(value.detach()) for name, value in sums.items()}


def _summary(log: list[dict[str, float]], stopped: bool) -> dict[str, float]:
    means = {name: sum(row[name] for row in log) / len(log) for name in log[0] if name != "skipped"}
    return means | {
        "first_ratio": log[0]["ratio"],
        "minibatches": len(log),
        "stopped_early": float(stopped),
        "skipped": sum(row["skipped"] for row in log),
    }


def _widened(values: torch.Tensor, columns: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, columns - values.shape[1]))
