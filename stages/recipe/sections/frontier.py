"""Settings of the frontier: ways to align, compared at equal KL."""

from dataclasses import dataclass
from typing import Literal

from stages.recipe.algorithms import TRAINED
from stages.recipe.ranges import COEFFICIENT, COUNT, POSITIVE, SEED, Range
from stages.recipe.schema import setting


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
