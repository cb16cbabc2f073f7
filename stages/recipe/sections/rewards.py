"""Settings of the reward, shared by the stages that sample and score."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.ranges import COEFFICIENT, POSITIVE, SIGNED, Range
from stages.recipe.schema import setting


def _check_rewards(rewards: tuple, scaling: str) -> None:
    names = [reward.source for reward in rewards]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards must name at least one source, and none twice, not {', '.join(names) or 'nothing'}")
    if scaling == "model" and not any(name == "model" or "/" in name for name in names):
        raise ValueError("reward_scaling 'model' needs the reward model among rewards: {source: model}")


@dataclass(frozen=True)
class RewardSource:
    """One of the reward functions whose weighted sum is the reward of a response."""

    source: str = setting(
        "model", "'model': the reward stage's, each of its members a source; folder of another reward artifact; "
        "'lexical': word counts, fitted on the reward split; a measure: repetition, has_code, response_tokens, "
        "response_characters; 'package.module:function'; folder or hub id of a sequence classifier with one output "
        "[script: model]")
    weight: float = setting(1.0, "weight of its score in the sum [ours]", within=SIGNED)
    reads: Literal["text", "ids"] = setting(
        "text", "what a function receives: (questions, responses) as 'text', or (prompts, responses) as token 'ids' "
        "[ours]")
    template: str = setting(
        "Question: {question}\n\nAnswer: {response}", "input of a classifier from a folder or the hub; write out "
        "special tokens such as an end of sequence [script]")

    def __post_init__(self):
        if "{response}" not in self.template:
            raise ValueError(f"template must contain {{response}}, and {self.template!r} does not")


@dataclass(frozen=True)
class RewardSettings:
    """What scores a response: sources, how they are combined, and penalties."""

    rewards: tuple[RewardSource, ...] = setting(
        (RewardSource(),), "reward functions whose weighted sum is the reward: a list of {source, weight, reads, "
        "template} [script]")
    reward_combine: Literal["mean", "min", "mean_minus_std"] = setting(
        "mean", "how the scores of several reward models are combined [Coste et al. 2023]")
    spread_penalty: float = setting(
        0.0, "coefficient of the standard deviation in 'mean_minus_std' [Coste et al. 2023]", within=COEFFICIENT)
    min_reward_correlation: float = setting(
        0.95, "do not start if the reward model's scores of reference answers correlate less than this with those "
        "from its training [ours]", within=Range(-1, 1))
    require_reward: Literal["chance", "baseline", "none"] = setting(
        "chance", "what each reward model must beat on its held-out pairs, by the whole 95 % interval: 'chance'; "
        "'baseline', also the best cheap baseline, which otherwise gives a warning; 'none', nothing [ours]")
    reward_baseline: float = setting(0.0, "subtracted from every sum [script]", within=SIGNED)
    reward_scaling: Literal["none", "model"] = setting(
        "none", "divide rewards by a standard deviation: 'model', of the reward model's scores of reference answers "
        "[script: none]")
    reward_clip: float | None = setting(
        None, "clip rewards to plus or minus this; null: no clipping [script]", within=POSITIVE)
    missing_eos: Literal["reduce", "replace"] = setting(
        "reduce", "if a response has no EOS: 'reduce' its reward by the penalty [ours]; 'replace' it by minus the "
        "penalty [N+]")
    missing_eos_penalty: float = setting(
        1.0, "penalty for a response without EOS, after the clip [N+ implementation details]", within=COEFFICIENT)

    prompt_template = "question"  # no setting, but of own prompts

    def __post_init__(self):
        _check_rewards(self.rewards, self.reward_scaling)
        if self.spread_penalty and self.reward_combine != "mean_minus_std":
            raise ValueError(f"spread_penalty is the coefficient of reward_combine 'mean_minus_std', and has no effect "
                             f"with {self.reward_combine!r}: set reward_combine, or leave spread_penalty at 0")
