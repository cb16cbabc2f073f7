"""One PPO iteration: sample responses, score them, estimate advantages, update; and the same on held-out prompts.

Everything random is drawn from generators that the caller seeds by iteration and purpose: the engine holds no random
state, so a run can be resumed at any iteration.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample_in_batches
from stages.generation.sampling_params import SamplingParams
from stages.rl.collect_rollouts import collect_rollout
from stages.rl.kl import KlController
from stages.rl.losses import masked_mean
from stages.rl.policy import Policy
from stages.rl.ppo_update import update
from stages.rl.rewards.shaping import RewardShaper, ShapedRewards
from stages.rl.trajectory import Trajectory, Update, build_trajectory, score_rollout
from stages.training.memory import track_peak_memory


class PhaseTimer:
    """Seconds, tokens a second and peak memory of each phase of an iteration."""

    def __init__(self):
        self.row: dict[str, float] = {}

    def run(self, name: str, tokens_of: Callable, call: Callable):
        """call() on the clock; tokens_of(its result) is what the phase worked through."""
        with track_peak_memory() as cost:
            found = call()
        peak = max(self.row.get("peak_memory_mib", 0), round(cost.peak_bytes / 2**20))
        self.row |= {
            f"{name}_seconds": round(cost.seconds, 3),
            f"{name}_tokens_per_second": round(tokens_of(found) / max(cost.seconds, 1e-9)),
            "peak_memory_mib": peak,
        }
        return found


@dataclass
class PPOTrainer:
    """The parts of a run that an iteration uses. `microbatch_prompts` shrinks when memory does not suffice."""

    policy: Policy
    rewards: RewardShaper
    optimizer: torch.optim.Optimizer
    controller: KlController
    sampling: SamplingParams
    update: Update
    keep_rollout_log_p: bool = False

    def iterate(
        self,
        prompts: list[list[int]],
        generator: Callable[[str], torch.Generator],
        learning_rate: float,
        only_values: bool = False,
    ) -> tuple[dict, dict]:
        """Learn from one rollout batch: numbers for the history, numbers for the timing.

        generator: a purpose ('sampling', 'minibatches') to its generator of this iteration. only_values: see
        Policy.only_values.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        phases = PhaseTimer()
        rollout = phases.run("rollout", _response_tokens, lambda: collect_rollout(
            self.policy, prompts, self.sampling, generator("sampling"), self.update.forward_prompts))
        scored = phases.run("score", lambda _: _all_tokens(rollout), lambda: self.rewards(
            rollout, update_statistics=True))
        seen = phases.run("experience", lambda _: _all_tokens(rollout), lambda: build_trajectory(
            self.policy, rollout, scored.rewards, self.controller.beta, self.update, self.keep_rollout_log_p))
        numbers = phases.run("update", lambda _: _all_tokens(rollout) * self.update.epochs, lambda: self._learn(
            seen, generator("minibatches"), only_values))
        row = self._row(rollout, scored, seen) | numbers | {"learning_rate": learning_rate}
        self.controller.update(row["kl"], len(prompts))
        return row, phases.row | {"tokens": _response_tokens(rollout)}

    def held_out(
        self, prompts: list[list[int]], batch_prompts: int, seed: int, kl_coefficient: float
    ) -> tuple[dict, Rollout, torch.Tensor]:
        """Numbers on prompts that are not trained on, met with the same random numbers each time; answers; rewards [B].

        objective: reward, before any running scale, minus kl_coefficient times the KL: by it a policy is chosen.
        """
        with self.policy.merged() as model:
            rollout = sample_in_batches(
                model, prompts, batch_prompts, seed, precision=self.policy.precision,
                max_new_tokens=self.sampling.max_response_tokens, temperature=self.sampling.temperature,
                stop_ids=self.sampling.stop_ids,
            )
        scored = self.rewards(rollout, update_statistics=False)
        kl, reward = score_rollout(self.policy, rollout, self.update.forward_prompts).sequence_kl(), float(scored.rewards.mean())
        objective = reward * scored.scale - kl_coefficient * kl
        row = {"reward": reward, "kl": kl, "objective": objective, **scored.numbers(), **rollout.numbers()}
        return row, rollout, scored.rewards

    def state(self) -> dict:
        """What changes from iteration to iteration beside weights and optimiser, as plain JSON."""
        return {
            "controller": self.controller.state(),
            "rewards": self.rewards.state(),
            "microbatch_prompts": self.update.microbatch_prompts,
            "keep_rollout_log_p": self.keep_rollout_log_p,
        }

    def restore(self, state: dict) -> None:
        """Go on from `state`."""
        self.controller.restore(state["controller"])
        self.rewards.restore(state["rewards"])
        self.update = replace(self.update, microbatch_prompts=state["microbatch_prompts"])
        self.keep_rollout_log_p = state["keep_rollout_log_p"]

    def _learn(self, seen: Trajectory, generator: torch.Generator, only_values: bool) -> dict:
        if only_values:
            with self.policy.only_values():
                return self._learn(seen, generator, only_values=False)
        numbers = update(self.policy, self.optimizer, seen, self.update, generator)
        self.update = replace(self.update, microbatch_prompts=numbers["microbatch_prompts"])
        return numbers

    def _row(self, rollout: Rollout, scored: ShapedRewards, seen: Trajectory) -> dict[str, float]:
        kl, reward = seen.sequence_kl(), float(scored.rewards.mean())
        return {
            "reward": reward,
            "reward_std": float(scored.rewards.std()),
            **scored.numbers(),
            "kl": kl,
            "kl_per_token": float(masked_mean(seen.log_p - seen.log_ref, seen.mask)),
            "beta": self.controller.beta,
            "objective": reward - self.controller.beta * kl,
            "entropy": float(masked_mean(rollout.entropy, seen.mask)),
            "reference_perplexity": math.exp(-float(masked_mean(seen.log_ref, seen.mask))),
            "explained_variance": seen.explained_variance(),
            **rollout.numbers(),
        }


def _response_tokens(rollout: Rollout) -> int:
    return sum(map(len, rollout.responses))


def _all_tokens(rollout: Rollout) -> int:
    return _response_tokens(rollout) + sum(map(len, rollout.prompts))
