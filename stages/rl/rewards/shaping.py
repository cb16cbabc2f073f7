"""From what several sources say of a rollout to one reward a response. Shapes: B rows."""

from dataclasses import dataclass
from typing import Literal

import torch

from stages.rl.rewards.running_moments import RunningMoments
from stages.rl.rewards.sources import MODEL, RewardFunction
from stages.stackexchange.prompt import question_of

NO_SPREAD = 1e-6  # rewards that differ by less are equal, and are not divided by their spread


@dataclass(frozen=True)
class Shaping:
    """What is done to the weighted sum, in this order: named as in the recipe's section ppo, and off unless given."""

    reward_baseline: float = 0.0
    reward_scaling: Literal["none", "model", "running"] = "none"
    reward_clip: float | None = None
    missing_eos: Literal["reduce", "replace"] = "reduce"
    missing_eos_penalty: float = 0.0
    short_response_tokens: int = 0
    short_response_penalty: float = 0.0


@dataclass(frozen=True)
class ShapedRewards:
    """rewards [B] fp32; parts: each source's unweighted scores [B] by name; scale: what the sums were divided by."""

    rewards: torch.Tensor
    parts: dict[str, torch.Tensor]
    scale: float

    def numbers(self) -> dict[str, float]:
        """For a row of the history: each source's mean under reward_<name>, and reward_scale."""
        means = {f"reward_{name}": float(part.mean()) for name, part in self.parts.items()}
        return {**means, "reward_scale": self.scale}


class RewardShaper:
    """The weighted sum of the sources, minus a baseline, divided by a scale, clipped, penalised.

    tokenizer: the policy's, which makes text of a rollout's ids for the sources that read text.
    """

    def __init__(self, sources: list[RewardFunction], tokenizer, shaping: Shaping):
        self.sources, self.tokenizer, self.shaping = sources, tokenizer, shaping
        self.running = RunningMoments()
        self.model_std = _model_std(sources) if shaping.reward_scaling == "model" else None

    def __call__(self, rollout, *, update_statistics: bool) -> ShapedRewards:
        """Rewards of a rollout (`prompts` and `responses` as lists of token ids, `ended` as a list of bool).

        update_statistics: True for a rollout that is trained on, which the running scale then counts in before it is
        used (TRL, trlX); False for held-out prompts.
        """
        parts = self._parts(rollout)
        total = sum(source.weight * parts[source.name] for source in self.sources)
        if update_statistics and self.shaping.reward_scaling == "running":
            self.running.merge(RunningMoments.of(total.tolist()))
        scale = self._scale()
        rewards = (total - self.shaping.reward_baseline) / scale
        if self.shaping.reward_clip is not None:
            rewards = rewards.clamp(-self.shaping.reward_clip, self.shaping.reward_clip)
        return ShapedRewards(self._penalised(rewards, rollout), parts, scale)

    def state(self) -> dict[str, float]:
        """Plain numbers for a checkpoint's JSON."""
        return self.running.state()

    def restore(self, state: dict[str, float]) -> None:
        """Go on from `state`."""
        self.running.restore(state)

    def _parts(self, rollout) -> dict[str, torch.Tensor]:
        given = {"ids": (rollout.prompts, rollout.responses)}
        if any(source.reads == "text" for source in self.sources):
            questions = [question_of(self.tokenizer, prompt) for prompt in rollout.prompts]
            given["text"] = (questions, self.tokenizer.batch_decode(
                rollout.responses, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        return {source.name: source(*given[source.reads]) for source in self.sources}

    def _scale(self) -> float:
        std = {"none": None, "model": self.model_std, "running": self.running.std()}[self.shaping.reward_scaling]
        return std if std is not None and std > NO_SPREAD else 1.0

    def _penalised(self, rewards: torch.Tensor, rollout) -> torch.Tensor:
        """Whether a response ended is what sampling says: an EOS inside a prompt is none of its own."""
        shaping, ended = self.shaping, torch.tensor(rollout.ended, dtype=torch.bool)
        fixed = torch.tensor(0.0) if shaping.missing_eos == "replace" else rewards
        rewards = torch.where(ended, rewards, fixed - shaping.missing_eos_penalty)
        short = torch.tensor([len(response) < shaping.short_response_tokens for response in rollout.responses])
        return torch.where(short, rewards - shaping.short_response_penalty, rewards)


def _model_std(sources: list[RewardFunction]) -> float:
    """The reward model's standard deviation on reference answers (reward_model.keep_scoring)."""
    std = next(source.score.std for source in sources if source.name == MODEL)
    if std is None or not std > NO_SPREAD:
        raise ValueError(f"reward_scaling 'model': this reward model's standard deviation is {std}: make it anew with "
                         f"stages.reward and stages.merge, or scale by 'running'")
    return std
