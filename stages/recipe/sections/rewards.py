"""Settings of the reward, for the sections of stages that sample and score: those of PPO again."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.schema import setting_of
from stages.recipe.sections.ppo import Ppo, RewardSource, check_rewards


@dataclass(frozen=True)
class RewardSettings:
    """What scores a response: sources, how they are combined, and penalties. The scale must be the same throughout."""

    rewards: tuple[RewardSource, ...] = setting_of(Ppo, "rewards")
    reward_combine: Literal["mean", "min", "mean_minus_std"] = setting_of(Ppo, "reward_combine")
    spread_penalty: float = setting_of(Ppo, "spread_penalty")
    min_reward_correlation: float = setting_of(Ppo, "min_reward_correlation")
    require_reward: Literal["chance", "baseline", "none"] = setting_of(Ppo, "require_reward")
    reward_baseline: float = setting_of(Ppo, "reward_baseline")
    reward_scaling: Literal["none", "model"] = setting_of(Ppo, "reward_scaling")
    reward_clip: float | None = setting_of(Ppo, "reward_clip")
    missing_eos: Literal["reduce", "replace"] = setting_of(Ppo, "missing_eos")
    missing_eos_penalty: float = setting_of(Ppo, "missing_eos_penalty")
    short_response_tokens: int = setting_of(Ppo, "short_response_tokens")
    short_response_penalty: float = setting_of(Ppo, "short_response_penalty")

    def __post_init__(self):
        check_rewards(self.rewards, self.reward_scaling)
        if self.spread_penalty and self.reward_combine != "mean_minus_std":
            raise ValueError(f"spread_penalty is the coefficient of reward_combine 'mean_minus_std', and has no effect "
                             f"with {self.reward_combine!r}: set reward_combine, or leave spread_penalty at 0")
