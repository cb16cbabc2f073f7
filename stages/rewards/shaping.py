"""Combine several reward functions into one scalar reward per response. Shapes: B rows."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal

import torch

from stages.reward_modeling.scorer import Combine, combine_scores
from stages.rewards.reward_functions import MODEL, RewardFunction
from stages.stackexchange.prompt import Template, parse_question

MIN_STD = 1e-6  # scores with a smaller standard deviation are equal, and are not divided by it


@dataclass(frozen=True)
class ShapingSettings:
    """Settings of the reward, applied in this order; named and explained as in the recipe's section ppo."""

    reward_combine: Combine
    spread_penalty: float
    reward_baseline: float
    reward_scaling: Literal["none", "model", "running", "start"]
    reward_clip: float | None
    missing_eos: Literal["reduce", "replace"]
    missing_eos_penalty: float
    prompt_template: Template


@dataclass(frozen=True)
class ShapedRewards:
    """Rewards [B] fp32; parts: unweighted scores [B] of each term of the sum, by name; scale: divisor of the sum."""

    rewards: torch.Tensor
    parts: dict[str, torch.Tensor]
    scale: float

    def metrics(self) -> dict[str, float]:
        """Return metrics for the history: each part's mean as reward_<name>, and reward_scale."""
        means = {f"reward_{name}": float(part.mean()) for name, part in self.parts.items()}
        return {**means, "reward_scale": self.scale}


class RewardSum:
    """Compute the weighted sum of the parts. The sources of one part (several reward models) are combined first.

    tokenizer: the policy's, for sources of text. combine, spread_penalty: of several reward models. template: of the
    prompts.
    """

    def __init__(self, sources: list[RewardFunction], tokenizer, *, combine: Combine, spread_penalty: float,
                 template: Template):
        self.sources, self.tokenizer, self.template = sources, tokenizer, template
        self.combine, self.spread_penalty = combine, spread_penalty
        self.weights = _part_weights(sources)

    def __call__(self, prompts: list, responses: list) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the weighted sum of the parts [B], and the unweighted scores [B] of each, of token ids."""
        parts = self._parts(prompts, responses)
        return sum(weight * parts[part] for part, weight in self.weights.items()), parts

    def _parts(self, prompts: list, responses: list) -> dict[str, torch.Tensor]:
        inputs = {"ids": (prompts, responses)}
        if any(source.reads == "text" for source in self.sources):
            questions = [parse_question(self.tokenizer, prompt, self.template) for prompt in prompts]
            inputs["text"] = (questions, self.tokenizer.batch_decode(
                responses, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        scores: dict[str, list[torch.Tensor]] = {part: [] for part in self.weights}
        for source in self.sources:
            scores[source.part].append(source(*inputs[source.reads]))
        return {part: combine_scores(several, self.combine, self.spread_penalty) for part, several in scores.items()}


class RewardShaper:
    """Compute rewards: the sum of the sources, minus a baseline, divided by a scale, clipped, penalised."""

    def __init__(self, sources: list[RewardFunction], tokenizer, settings: ShapingSettings):
        self.settings = settings
        self.sum_parts = RewardSum(sources, tokenizer, combine=settings.reward_combine,
                                   spread_penalty=settings.spread_penalty, template=settings.prompt_template)
        self.running = RunningMoments()  # of all rollouts or, if reward_scaling is 'start', of the first answers
        self.model_std = _model_std(sources) if settings.reward_scaling == "model" else None

    def __call__(self, rollout, *, update_statistics: bool) -> ShapedRewards:
        """Compute the rewards of a rollout (`prompts`, `responses`: lists of token ids; `ended`: list of bool).

        update_statistics: the rollout is trained on, and the running scale includes it (as in TRL and trlX).
        """
        settings = self.settings
        total, parts = self.sum_parts(rollout.prompts, rollout.responses)
        if update_statistics and settings.reward_scaling == "running":
            self.running.merge(RunningMoments.from_values(total.tolist()))
        scale = self._scale()
        rewards = shape_rewards(total, rollout.ended, settings, self._start_mean(), scale)
        return ShapedRewards(rewards, parts, scale)

    def measure_start(self, rollout) -> None:
        """Take mean and standard deviation from answers of the untrained policy, if reward_scaling is 'start'."""
        if self.settings.reward_scaling == "start":
            total, _ = self.sum_parts(rollout.prompts, rollout.responses)
            self.running = RunningMoments.from_values(total.tolist())

    def score_units(self) -> tuple[float, float]:
        """Return factor and offset that make a reward of the reward model's score, without clip and penalties.

        A running scale is 1 before the first rollout.
        """
        scale, weight = self._scale(), self.sum_parts.weights.get(MODEL, 1.0)
        return weight / scale, -(self.settings.reward_baseline + self._start_mean()) / scale

    def selection_score(self, shaped: ShapedRewards, kl: float, kl_coefficient: float) -> float:
        """Compute the objective of training in units of the unscaled reward: what chooses the best policy.

        kl: nats a response. Training maximises the scaled reward minus the weighted KL. That times the scale has the
        same order, and compares policies that were measured at different values of a running scale.
        """
        return shaped.scale * (float(shaped.rewards.mean()) - kl_coefficient * kl)

    def state(self) -> dict[str, float]:
        """Return the running statistics as plain numbers for a checkpoint."""
        return self.running.state()

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state`."""
        self.running.restore(state)

    def _scale(self) -> float:
        std = {"none": None, "model": self.model_std}.get(self.settings.reward_scaling, self.running.std())
        return std if std is not None and std > MIN_STD else 1.0

    def _start_mean(self) -> float:
        return self.running.mean if self.settings.reward_scaling == "start" else 0.0


def shape_rewards(total: torch.Tensor, ended: list[bool], settings: ShapingSettings, mean: float, scale: float
                  ) -> torch.Tensor:
    """Subtract baseline and mean from sums [B], divide by the scale, clip, and apply the penalty.

    ended: by sampling. An EOS inside the prompt does not count.
    """
    rewards = (total - settings.reward_baseline - mean) / scale
    if settings.reward_clip is not None:
        rewards = rewards.clamp(-settings.reward_clip, settings.reward_clip)
    without_eos = torch.tensor(0.0) if settings.missing_eos == "replace" else rewards
    return torch.where(torch.tensor(ended, dtype=torch.bool), rewards, without_eos - settings.missing_eos_penalty)


def _part_weights(sources: list[RewardFunction]) -> dict[str, float]:
    """Weight of each part; ValueError if sources of one part have different ones."""
    weights: dict[str, float] = {}
    for source in sources:
        if weights.setdefault(source.part, source.weight) != source.weight:
            raise ValueError("rewards: the scores of all reward models are combined to one: give them the same weight")
    return weights


def _model_std(sources: list[RewardFunction]) -> float:
    """Standard deviation of the reward model's scores of reference answers; the mean of several models' ones."""
    stds = [source.score.std for source in sources if source.part == MODEL]
    std = sum(stds) / len(stds) if stds and None not in stds else None
    if std is None or not std > MIN_STD:
        raise ValueError(f"reward_scaling 'model': the standard deviation of the reward model is {std}: make it again "
                         f"with stages.reward and stages.merge, or scale by 'running'")
    return std


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations in float64, merged exactly (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "RunningMoments":
        """Compute the moments of one batch."""
        values = [float(value) for value in values]
        mean = math.fsum(values) / len(values) if values else 0.0
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    def merge(self, other: "RunningMoments") -> None:
        """Add the moments of another batch, or of another process."""
        count = self.count + other.count
        if not count:
            return
        difference = other.mean - self.mean
        self.squares += other.squares + difference**2 * self.count * other.count / count
        self.mean += difference * other.count / count
        self.count = count

    def std(self) -> float | None:
        """Return the standard deviation (over n - 1, as TRL and trlX); None for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None

    def state(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return asdict(self)

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
