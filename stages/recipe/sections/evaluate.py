"""Settings of the evaluation and the report."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import (
    CpuKernels,
    Precision,
    cpu_kernels_setting,
)
from stages.recipe.ranges import BATCH, COUNT, COUNT_OR_NONE, SEED, TEMPERATURE, TOKENS, Range
from stages.recipe.schema import setting


@dataclass(frozen=True)
class Evaluate:
    """Comparison on held-out questions: reward model with baselines, policies with each other."""

    max_pairs: int = setting(20_000, "maximum held-out pairs to measure the reward model on [ours]", within=COUNT)
    surface_pairs: int = setting(
        5_000, "maximum pairs of the reward split to fit the surface baseline on [ours]", within=COUNT)
    prompts: int = setting(256, "held-out prompts that every policy answers [ours]", within=COUNT)
    best_of: tuple[int, ...] = setting(
        (2, 4, 8, 16), "best-of-n of SFT for each n; SFT answers each prompt as often as the largest n; empty: none "
        "[ours]", within=Range(2, 100_000))
    precision: Precision = setting(
        "fp32", "precision of the policies, the reward model and the judge, of which one is in memory at a time [ours]")
    batch_prompts: int = setting(64, "prompts per forward pass [ours]", within=BATCH)
    batch_texts: int = setting(64, "texts per forward pass of a reward model [ours]", within=BATCH)
    max_prompt_tokens: int = setting(512, "as in ppo [script]", within=TOKENS)
    max_response_tokens: int = setting(128, "as in ppo [run]", within=TOKENS)
    temperature: float = setting(
        1.0, "sampling temperature of all policies, also where KL is measured [script]", within=TEMPERATURE)
    temperatures: tuple[float, ...] = setting(
        (1.0, 0.7, 0.5, 0.3, 0.1, 0.0), "temperatures of which SFT and each policy get the one with the highest learnt "
        "reward, to be compared each at its best; 0: greedy [ours]", within=Range(0, 100))
    temperature_prompts: int = setting(
        64, "held-out prompts to choose those temperatures on, apart from `prompts`; at most a quarter of the split; "
        "0: choose none, all keep `temperature` [ours]", within=COUNT_OR_NONE)
    bootstrap_samples: int = setting(
        2000, "bootstrap resamples of the questions for 95 % intervals [ours]", within=Range(1, 10**6))
    gold: str | None = setting(
        None, "'package.module:function' of (questions, responses) that computes the gold score; null: none [ours]")
    train_judge: Literal["auto", "always", "none"] = setting(
        "auto", "when to train a judge, a held-out reward model of another seed and other questions: 'auto', if `gold` "
        "is null; 'always'; 'none', never [ours]")
    length_control: bool = setting(
        False, "train, beside PPO, a PPO that is paid for the length of its answers alone and ends at about the same "
        "KL, and say how much of PPO's gain is at equal length [Singhal et al. 2023]", absent_means=False)
    scorers: tuple[str, ...] = setting(
        (), "more scores of all policies, as sources in ppo.rewards that read text: 'package.module:function', "
        "has_code, ...; in the verdict, a rise in one counts as a rise in reward [ours]")
    cpu_kernels: CpuKernels = cpu_kernels_setting()
    cache: bool = setting(
        True, "take samples, log-probabilities and rewards of the same models, inputs, settings and code from .cache/ "
        "in the run's folder, where earlier evaluations stored them [ours]", affects_result=False)
    seed: int = setting(0, "seed of sampling and bootstrap [ours]", within=SEED)

    def __post_init__(self):
        if len(set(self.best_of)) < len(self.best_of):
            raise ValueError(f"best_of must have no number twice, not {self.best_of}")
        if not self.temperatures or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must be one or more numbers, none twice, not {self.temperatures}")
        if "model" in self.scorers or len(set(self.scorers)) < len(self.scorers):
            raise ValueError("scorers must not name the reward model, nor anything twice, not "
                             + ", ".join(self.scorers))


@dataclass(frozen=True)
class Report:
    """The report page."""

    side_by_side: int = setting(40, "questions shown with the answers of all policies [ours]", within=COUNT_OR_NONE)
    figure_width_inches: float = setting(7.0, "width of a figure [ours]", within=Range(1, 20))
