"""Settings of the evaluation, the report and the frontier: ways to align, compared at equal KL."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.algorithms import TRAINED
from stages.recipe.ranges import BATCH, COEFFICIENT, COUNT, COUNT_OR_NONE, POSITIVE, SEED, TEMPERATURE, TOKENS, Range
from stages.recipe.schema import setting, setting_of
from stages.recipe.sections.shared import CpuKernels, Precision, Training


@dataclass(frozen=True)
class Evaluate:
    """Comparison on held-out questions: reward model with baselines, policies with each other."""

    max_pairs: int = setting(20_000, "maximum held-out pairs to measure the reward model on [ours]", within=COUNT)
    prompts: int = setting(256, "held-out prompts that every policy answers [ours]", within=COUNT)
    best_of: tuple[int, ...] = setting(
        (2, 4, 8, 16), "best-of-n of SFT for each n; SFT answers each prompt as often as the largest n; empty: none "
        "[ours]", within=Range(2, 100_000))
    precision: Precision = setting(
        "fp32", "precision of the policies, the reward model and the judge, of which one is in memory at a time [ours]")
    batch_prompts: int = setting(64, "prompts per forward pass [ours]", within=BATCH)
    batch_texts: int = setting(
        64, "maximum texts per forward pass of a reward model, beside 8,192 tokens [ours]", within=BATCH)
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
    cpu_kernels: CpuKernels = setting_of(Training, "cpu_kernels")
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


@dataclass(frozen=True)
class Frontier:
    """What is trained for the frontier, on what it is evaluated, and its page."""

    algorithms: tuple[Literal[TRAINED], ...] = setting(
        ("ppo", "rloo", "grpo", "dpo", "expert_iteration", "ilql"),
        "algorithms to train, each with its own section of the recipe [ours]")
    ppo_kl_coefficients: tuple[float, ...] = setting(
        (0.03, 0.1, 0.3, 1.0), "PPO is trained once for each, as a fixed ppo.kl_coefficient [ours]", within=COEFFICIENT)
    dpo_betas: tuple[float, ...] = setting(
        (0.03, 0.1, 0.3), "DPO is trained once for each, as dpo.beta [ours]", within=POSITIVE)
    best_of: tuple[int, ...] = setting(
        (2, 4, 8, 16, 32, 64), "best-of-n of SFT for each n, as evaluate.best_of; n = 1 is SFT [Gao et al. 2022: up to "
        "60,000]", within=Range(2, 100_000))
    prompts: int = setting(
        200, "held-out prompts that every policy answers, as evaluate.prompts; each costs as many SFT answers as the "
        "largest n [ours]", within=COUNT)
    max_pairs: int = setting(
        1_000, "held-out pairs that reward model and judge are measured on, as evaluate.max_pairs [ours]", within=COUNT)
    bootstrap_samples: int = setting(
        2000, "bootstrap resamples of the questions for 95 % intervals [ours]", within=Range(1, 10**6))
    seed: int = setting(0, "seed of the bootstrap [ours]", within=SEED)

    def __post_init__(self):
        for name in ("algorithms", "ppo_kl_coefficients", "dpo_betas", "best_of"):
            values = getattr(self, name)
            if len(set(values)) < len(values):
                raise ValueError(f"{name} must have nothing twice, not {', '.join(map(str, values))}")
