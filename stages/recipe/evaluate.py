"""TODO docstring."""

from dataclasses import dataclass

from stages.recipe.schema import setting


@dataclass(frozen=True)
class Evaluate:
    """Held-out comparison of reward model with baselines, and of policies with each other."""

    max_pairs: int = setting(20_000, "held-out pairs that the reward model is judged on, at most [ours]")
    surface_pairs: int = setting(5_000, "pairs of the reward split that the logistic regression learns from, at most [ours]")
    prompts: int = setting(256, "held-out prompts that every policy answers [ours]")
    best_of: tuple[int, ...] = setting(
        (2, 4, 8, 16), "best-of-n of SFT for each n; the largest is how many answers SFT gives to a prompt; "
        "empty: none [ours]")
    batch_prompts: int = setting(64, "prompts a forward pass [ours]")
    max_prompt_tokens: int = setting(512, "as in ppo [script]")
    max_response_tokens: int = setting(128, "as in ppo [run]")
    temperature: float = setting(1.0, "of all policies [script]")
    bootstrap_samples: int = setting(2000, "for 95 % intervals, by question [ours]")
    gold: str | None = setting(None, "'package.module:function' over (questions, responses) that knows the truth [ours]")
    scorers: tuple[str, ...] = setting(
        (), "further scores of all policies, as sources in ppo.rewards that read text: 'package.module:function', "
        "has_code, ...; a rise in one counts in the verdict as a rise in reward [ours]")
    seed: int = setting(0, "of sampling and bootstrap [ours]")

    def __post_init__(self):
        if any(n < 2 for n in self.best_of) or len(set(self.best_of)) < len(self.best_of):
            raise ValueError(f"best_of must be numbers of 2 or more, none twice, not {self.best_of}")
        if "model" in self.scorers or len(set(self.scorers)) < len(self.scorers):
            raise ValueError(f"scorers come beside the reward model, and none twice, not {', '.join(self.scorers)}")


@dataclass(frozen=True)
class Report:
    """One page for people."""

    side_by_side: int = setting(40, "questions shown with all answers [ours]")
    figure_width_inches: float = setting(7.0, "of each figure [ours]")
