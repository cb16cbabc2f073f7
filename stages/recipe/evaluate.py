"""Settings of the evaluation and the report."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.checks import CpuKernels, cpu_kernels_setting
from stages.recipe.schema import setting


@dataclass(frozen=True)
class Evaluate:
    """Comparison on held-out questions: reward model with baselines, policies with each other."""

    max_pairs: int = setting(20_000, "maximum held-out pairs to measure the reward model on [ours]")
    surface_pairs: int = setting(5_000, "maximum pairs of the reward split to fit the surface baseline on [ours]")
    prompts: int = setting(256, "held-out prompts that every policy answers [ours]")
    best_of: tuple[int, ...] = setting(
        (2, 4, 8, 16), "best-of-n of SFT for each n; SFT answers each prompt as often as the largest n; empty: none "
        "[ours]")
    batch_prompts: int = setting(64, "prompts per forward pass [ours]")
    max_prompt_tokens: int = setting(512, "as in ppo [script]")
    max_response_tokens: int = setting(128, "as in ppo [run]")
    temperature: float = setting(1.0, "sampling temperature of all policies, also where KL is measured [script]")
    temperatures: tuple[float, ...] = setting(
        (1.0, 0.7, 0.5, 0.3, 0.1, 0.0), "temperatures of which SFT and each policy get the one with the highest learnt "
        "reward, to be compared each at its best; 0: greedy [ours]")
    temperature_prompts: int = setting(
        64, "held-out prompts to choose those temperatures on, apart from `prompts`; at most a quarter of the split; "
        "0: choose none, all keep `temperature` [ours]")
    bootstrap_samples: int = setting(2000, "bootstrap resamples of the questions for 95 % intervals [ours]")
    gold: str | None = setting(
        None, "'package.module:function' of (questions, responses) that computes the gold score; null: none [ours]")
    train_judge: Literal["auto", "always", "none"] = setting(
        "auto", "when to train a judge, a held-out reward model of another seed and other questions: 'auto', if `gold` "
        "is null; 'always'; 'none', never [ours]")
    scorers: tuple[str, ...] = setting(
        (), "more scores of all policies, as sources in ppo.rewards that read text: 'package.module:function', "
        "has_code, ...; in the verdict, a rise in one counts as a rise in reward [ours]")
    cpu_kernels: CpuKernels = cpu_kernels_setting()
    seed: int = setting(0, "seed of sampling and bootstrap [ours]")

    def __post_init__(self):
        if any(n < 2 for n in self.best_of) or len(set(self.best_of)) < len(self.best_of):
            raise ValueError(f"best_of must be numbers of 2 or more, none twice, not {self.best_of}")
        if not self.temperatures or min(self.temperatures) < 0 or len(set(self.temperatures)) < len(self.temperatures):
            raise ValueError(f"temperatures must be one or more numbers of 0 or more, none twice, not "
                             f"{self.temperatures}")
        if self.temperature_prompts < 0:
            raise ValueError(f"temperature_prompts must be 0 or more, not {self.temperature_prompts}")
        if "model" in self.scorers or len(set(self.scorers)) < len(self.scorers):
            raise ValueError("scorers must not name the reward model, nor anything twice, not "
                             + ", ".join(self.scorers))


@dataclass(frozen=True)
class Report:
    """The report page."""

    side_by_side: int = setting(40, "questions shown with the answers of all policies [ours]")
    figure_width_inches: float = setting(7.0, "width of a figure [ours]")
