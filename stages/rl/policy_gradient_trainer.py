"""Train a language model with PPO, RLOO or GRPO against a reward, with a KL penalty to a frozen reference.

`PolicyGradientTrainer.step` is one iteration of the algorithm. Its outer loop (evaluation, checkpoints, early stopping)
is in training_loop.py. The algorithms differ in the advantage estimator, in whether there is a critic, and in three
settings of the loss (`UpdateSettings`).

Sources: PPO (arXiv 1707.06347), its use on language models (arXiv 1909.08593 and 2203.02155), and "The N Implementation
Details of RLHF with PPO"; RLOO (arXiv 2402.14740); GRPO (arXiv 2402.03300).
Shapes: B responses (rows), R response tokens. Masks are 1.0 at response tokens, and tensors 0 elsewhere.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

import torch

from stages.distributed.units import sum_gradients
from stages.generation.rollout import Rollout
from stages.rewards.kl import KlController, kl_k3, kl_penalised_rewards
from stages.rewards.shaping import RewardShaper, ShapedRewards
from stages.rl.advantages import AdvantageEstimator
from stages.rl.collect_rollouts import SamplingParams, collect_rollout
from stages.rl.losses import (
    LossMean,
    RatioLevel,
    kl_in_loss,
    masked_mean,
    masked_sum,
    minibatch_weights,
    policy_loss,
    probability_ratio,
    sampler_metrics,
    sum_means,
    value_loss,
)
from stages.rl.policy import POLICY, ROLES, VALUE, Policy
from stages.rl.trajectory import Trajectory, score_rollout
from stages.training.memory import PhaseTimer, retry_with_smaller_batches
from stages.training.optimizers import clip_gradient_norm, scale_learning_rates

STATISTICS = ("policy_loss", "value_loss", "ratio", "clip_fraction", "update_kl")
CRITIC_METRICS = ("value_loss", "explained_variance")


@dataclass(frozen=True)
class UpdateSettings:
    """Settings of the update, named as in the recipe's sections; a minibatch's size is in rows.

    ratio_level: whose probability ratio is clipped, a token's or a response's. loss_mean: mean over all tokens, or over
    responses of the mean over their tokens. kl_importance_weight: see `kl_in_loss`.
    responses_per_prompt: that are neighbours in a rollout. They are in one minibatch, which computes their prompt once.
    max_sampler_ratio: largest weight of `minibatch_weights`; None: no weights.
    """

    epochs: int
    minibatch_prompts: int
    microbatch_prompts: int
    clip_range: float
    max_gradient_norm: float | None
    max_ratio: float
    update_kl_limit: float | None
    value_clip_range: float | None
    value_coefficient: float
    ratio_level: RatioLevel
    loss_mean: LossMean
    kl_importance_weight: bool
    responses_per_prompt: int
    max_sampler_ratio: float | None


class MinibatchSize(NamedTuple):
    """What the losses of a minibatch are means of: its response tokens, a scalar tensor, and its responses."""

    tokens: torch.Tensor
    responses: int


@dataclass
class PolicyGradientTrainer:
    """The parts of a policy gradient method and its `step`.

    The trainer has no random state: each step is given its generators, so a run can resume at any iteration.
    forward_prompts: rows per forward pass without gradients. kl_in: whether the KL penalty is part of the reward or of
    the loss. reuse_rollout_logprobs: see `score_rollout`.
    """

    policy: Policy
    reward_shaper: RewardShaper
    optimizer: torch.optim.Optimizer
    kl_controller: KlController
    sampling: SamplingParams
    estimate_advantages: AdvantageEstimator
    update_settings: UpdateSettings
    kl_estimator: str
    forward_prompts: int
    kl_in: Literal["reward", "loss"] = "reward"
    reuse_rollout_logprobs: bool = False

    def step(
        self, prompts: list[list[int]], generators: Callable[[str], torch.Generator],
        learning_rate_factor: float = 1.0, *, kl_factor: float = 1.0, critic_only: bool = False,
    ) -> tuple[dict, dict]:
        """Run one iteration on a batch of prompts; return the rows of the history and of the timing.

        prompts: a prompt with several responses is there several times, one after the other.
        generators: maps 'sampling' and 'minibatches' to this iteration's generators. learning_rate_factor, kl_factor:
        by which schedules multiply the optimizer's learning rates and the KL coefficient. critic_only: train only the
        value function.
        """
        timer, kl_coefficient = PhaseTimer(), kl_factor * self.kl_controller.kl_coefficient
        in_reward = self.kl_in == "reward"

        # 1. Collect: sample a response to each prompt.
        with timer.phase("rollout"):
            rollout = collect_rollout(self.policy, prompts, self.sampling, generators("sampling"), self.forward_prompts)

        # 2. Score: a reward for each response [B]; log-probabilities and a value for each of its tokens [B, R].
        with timer.phase("score"):
            shaped = self.reward_shaper(rollout, update_statistics=True)
        with timer.phase("experience"):
            scores = score_rollout(self.policy, rollout, self.forward_prompts, self.reuse_rollout_logprobs)

            # 3. Penalise: -kl_coefficient KL at each token, plus the response's reward at its last token [B, R].
            token_rewards = kl_penalised_rewards(
                shaped.rewards.to(scores.logprobs), scores.logprobs, scores.ref_logprobs, scores.mask,
                kl_coefficient if in_reward else 0.0, self.kl_estimator)

            # 4. Estimate advantages and returns [B, R].
            advantages, returns = self.estimate_advantages(token_rewards, scores.values, scores.mask)
            trajectory = Trajectory.from_scores(rollout, scores, advantages, returns, self.reuse_rollout_logprobs)

        # 5. Update policy and critic, if there is one: epochs of minibatch steps on the clipped losses. Adapt the KL's
        # coefficient.
        with timer.phase("update"), self.policy.critic_only() if critic_only else nullcontext():
            scale_learning_rates(self.optimizer, learning_rate_factor)
            statistics = update_policy(
                self.policy, self.optimizer, trajectory, self.update_settings, generators("minibatches"),
                0.0 if in_reward else kl_coefficient)
        self.update_settings = replace(self.update_settings, microbatch_prompts=statistics["microbatch_prompts"])
        row = {**self._metrics(rollout, shaped, trajectory, kl_coefficient), **statistics,
               "learning_rate": self.optimizer.param_groups[0]["lr"]}
        if not self.policy.has_critic:
            row = {name: value for name, value in row.items() if name not in CRITIC_METRICS}
        self.kl_controller.update(row["kl"], len(prompts))
        return row, _timing_row(timer, rollout, self.update_settings.epochs)

    def state(self) -> dict:
        """Return as JSON what changes between iterations, besides weights and optimiser."""
        return {
            "kl_controller": self.kl_controller.state(),
            "reward_shaper": self.reward_shaper.state(),
            "microbatch_prompts": self.update_settings.microbatch_prompts,
            "reuse_rollout_logprobs": self.reuse_rollout_logprobs,
        }

    def restore(self, state: dict) -> None:
        """Continue from a `state()`."""
        self.kl_controller.restore(state["kl_controller"])
        self.reward_shaper.restore(state["reward_shaper"])
        self.update_settings = replace(self.update_settings, microbatch_prompts=state["microbatch_prompts"])
        self.reuse_rollout_logprobs = state["reuse_rollout_logprobs"]

    def _metrics(
        self, rollout: Rollout, shaped: ShapedRewards, trajectory: Trajectory, kl_coefficient: float
    ) -> dict[str, float]:
        """Summarise a rollout. objective: what PPO maximises, the mean reward minus the weighted KL."""
        kl, reward = trajectory.sequence_kl(), float(shaped.rewards.mean())
        return {
            "reward": reward,
            "reward_std": float(shaped.rewards.std()),
            **shaped.metrics(),
            "kl": kl,
            "kl_per_token": float(masked_mean(trajectory.logprobs - trajectory.ref_logprobs, trajectory.mask)),
            "beta": kl_coefficient,
            "objective": reward - kl_coefficient * kl,
            "entropy": float(masked_mean(rollout.entropy, trajectory.mask)),
            "reference_perplexity": math.exp(-float(masked_mean(trajectory.ref_logprobs, trajectory.mask))),
            "explained_variance": trajectory.explained_variance(),
            **rollout.metrics(),
            **sampler_metrics(trajectory, self.update_settings.ratio_level, self.update_settings.max_sampler_ratio),
        }


def update_policy(
    policy: Policy, optimizer, trajectory: Trajectory, settings: UpdateSettings, generator: torch.Generator,
    kl_coefficient: float = 0.0
) -> dict:
    """Train on every response once per epoch, in a new order of the prompts each epoch; return mean statistics.

    kl_coefficient: of the KL in the loss.

    Stops once the policy has moved `update_kl_limit` nats per token from the rollout's. Skips a minibatch whose mean
    ratio is above `max_ratio` or whose gradient is not finite (`skipped`: their number). Shrinks the microbatch
    when memory does not suffice (`microbatch_prompts`: its size at the end).
    """
    log: list[dict[str, float]] = []
    stopped = False
    for rows in draw_minibatches(len(trajectory.prompts), settings, generator):
        means, microbatch = backward_with_oom_retry(policy, trajectory, rows, settings, kl_coefficient)
        settings = replace(settings, microbatch_prompts=microbatch)
        log.append(_optimizer_step(optimizer, means, settings))
        stopped = settings.update_kl_limit is not None and log[-1]["update_kl"] > settings.update_kl_limit
        if stopped:
            break
    return {name: sum(row[name] for row in log) / len(log) for name in log[0] if name != "skipped"} | {
        "first_ratio": log[0]["ratio"],
        "minibatches": len(log),
        "microbatch_prompts": settings.microbatch_prompts,
        "update_stopped_early": float(stopped),
        "skipped": sum(row["skipped"] for row in log),
    }


def draw_minibatches(rows: int, settings: UpdateSettings, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Yield the row indices of each minibatch [b], epoch after epoch."""
    group_size = settings.responses_per_prompt
    for _ in range(settings.epochs):
        groups = torch.randperm(rows // group_size, generator=generator)
        order = groups[:, None] * group_size + torch.arange(group_size)
        yield from order.flatten().split(settings.minibatch_prompts)


def backward_with_oom_retry(
    policy: Policy, trajectory: Trajectory, rows: torch.Tensor, settings: UpdateSettings, kl_coefficient: float = 0.0
) -> tuple[dict[str, float], int]:
    """Compute the gradients of a minibatch, rows [b]; return the means of STATISTICS and the microbatch that fits.

    The processes share the microbatches, of which policy and critic are apart where these share no weights; each then
    has the gradients of all rows.
    """
    size, roles = MinibatchSize(trajectory.mask[rows].sum(), len(rows)), policy.separate_roles()
    parameters = {own_roles: policy.parameters_of(own_roles) for own_roles in roles}

    def backward(unit: tuple[torch.Tensor, tuple[str, ...]], weight: float) -> torch.Tensor:
        """Compute the gradients of a microbatch, given its rows and roles; return its summed STATISTICS."""
        microbatch_rows, own_roles = unit
        loss, sums = policy_gradient_loss(
            policy, trajectory, microbatch_rows, size, settings, kl_coefficient, own_roles)
        if loss.requires_grad:  # not the policy's while only the critic learns
            (weight * loss).backward()
        return sums

    sums, microbatch = retry_with_smaller_batches(
        lambda microbatch: sum_gradients(list(product(rows.split(microbatch), roles)), backward,
                                         lambda unit: parameters[unit[1]], len(STATISTICS)),
        settings.microbatch_prompts)
    means = sums / float(size.tokens)
    return dict(zip(STATISTICS, means.tolist(), strict=True)), microbatch


def policy_gradient_loss(
    policy: Policy, trajectory: Trajectory, rows: torch.Tensor, size: MinibatchSize, settings: UpdateSettings,
    kl_coefficient: float = 0.0, roles: tuple[str, ...] = ROLES
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the loss of some rows as their share of a minibatch's mean, and STATISTICS summed over their tokens.

    Loss: clipped policy loss (arXiv 1707.06347, eq. 7) + value_coefficient * clipped value loss
    + kl_coefficient * `kl_in_loss`. `minibatch_weights` weight the first.
    roles: of `Policy.separate_roles`; the loss and the statistics of another one are 0.
    """
    index = rows.tolist()
    new = policy([trajectory.prompts[i] for i in index], [trajectory.responses[i] for i in index], roles)
    old_logprobs, ref_logprobs, old_values, advantages, returns = (
        x[rows, : new.mask.shape[1]] for x in (trajectory.logprobs, trajectory.ref_logprobs, trajectory.values,
                                               trajectory.advantages, trajectory.returns))
    items = size.tokens if settings.loss_mean == "token" else size.responses
    loss, sums = new.mask.new_zeros(()), dict.fromkeys(STATISTICS, new.mask.new_zeros(()))
    if POLICY in roles:
        ratio = probability_ratio(new.logprobs, old_logprobs, new.mask, settings.ratio_level)
        weights = minibatch_weights(trajectory, rows, new.mask, settings.ratio_level, settings.max_sampler_ratio)
        loss = sum_means(policy_loss(ratio, advantages, settings.clip_range) * weights, new.mask, settings.loss_mean)
        if kl_coefficient:
            kl = kl_in_loss(new.logprobs, ref_logprobs, old_logprobs, new.mask, settings.ratio_level,
                            importance_weight=settings.kl_importance_weight)
            loss = loss + kl_coefficient * sum_means(kl, new.mask, settings.loss_mean)
        with torch.no_grad():
            clipped = ((ratio - 1).abs() > settings.clip_range).float()
            monitored = {"ratio": ratio, "clip_fraction": clipped, "update_kl": kl_k3(old_logprobs, new.logprobs)}
            sums |= {name: masked_sum(x, new.mask) for name, x in monitored.items()}
            sums["policy_loss"] = loss * (size.tokens / items)
    if VALUE in roles:
        value_part = masked_sum(value_loss(new.values, old_values, returns, settings.value_clip_range), new.mask)
        loss, sums["value_loss"] = loss + settings.value_coefficient * value_part, value_part.detach()
    return loss / items, torch.stack(list(sums.values()))


def _optimizer_step(optimizer, means: dict[str, float], settings: UpdateSettings) -> dict[str, float]:
    """Clip the gradient and step, unless the minibatch is to be skipped; return its statistics."""
    norm = clip_gradient_norm(optimizer, settings.max_gradient_norm)
    skipped = not (means["ratio"] <= settings.max_ratio and norm < float("inf"))
    if not skipped:
        optimizer.step()
    return means | {"gradient_norm": norm, "skipped": float(skipped)}


def _timing_row(timer: PhaseTimer, rollout: Rollout, epochs: int) -> dict[str, float]:
    """Return the row of timing.jsonl; a phase's tokens are those it processes."""
    sampled = sum(map(len, rollout.responses))
    total = sampled + sum(map(len, rollout.prompts))
    processed = {"rollout": sampled, "score": total, "experience": total, "update": total * epochs}
    return timer.metrics(processed) | {"tokens": sampled}
