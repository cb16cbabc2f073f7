"""Settings of best-of-n."""

from dataclasses import dataclass

from stages.recipe.checks import (
    CpuKernels,
    LogTo,
    Precision,
    check_log_to,
    cpu_kernels_setting,
    log_to_setting,
)
from stages.recipe.ranges import BATCH, COUNT, SEED, Range
from stages.recipe.schema import setting, setting_of
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rewards import RewardSettings


@dataclass(frozen=True)
class BestOfN(RewardSettings):
    """Rejection sampling as a policy: of n responses of the SFT model, the one with the highest reward."""

    n: int = setting(16, "responses sampled to each prompt [Stiennon et al. 2020; ours: 16]", within=Range(1, 10**6))
    prompts: int | None = setting(None, "prompts of the rl split, a seeded choice; null: all [ours]", within=COUNT)
    temperature: float = setting_of(Ppo, "temperature")
    max_prompt_tokens: int = setting_of(Ppo, "max_prompt_tokens")
    max_response_tokens: int = setting_of(Ppo, "max_response_tokens")
    batch_prompts: int = setting(16, "prompts sampled at once, with n responses each [ours]", within=BATCH)
    save_every_prompts: int = setting(
        64, "prompts whose scored responses are stored together: what a kill costs at most [ours]", within=COUNT)
    precision: Precision = setting("bf16", "precision of policy and reward model [ours]")
    bootstrap_samples: int = setting(1000, "bootstrap samples of each 95 % interval [ours]", within=COUNT)
    cpu_kernels: CpuKernels = cpu_kernels_setting()
    log_to: LogTo = log_to_setting()
    seed: int = setting(0, "seed of prompts, sampling and intervals [ours]", within=SEED)

    def __post_init__(self):
        super().__post_init__()
        check_log_to(self.log_to)
