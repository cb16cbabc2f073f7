"""Where rewards come from: the reward model, published ones, measures of the text, functions of the user's.

Shapes: B rows, one response each.
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stages.generation.text_metrics import has_code, repetition
from stages.recipe import user_functions
from stages.reward_modeling.scorer import Scorer
from stages.rl.rewards.classifier import PublishedScorer

MODEL = "model"
# To add a measure: one line, what of one response it reads and the function of it.
MEASURES: dict[str, tuple[Literal["text", "ids"], Callable]] = {
    "repetition": ("ids", repetition),
    "has_code": ("text", has_code),
    "response_tokens": ("ids", len),
    "response_characters": ("text", len),
}


@dataclass(frozen=True)
class RewardFunction:
    """A named scorer.

    reads 'ids': score(prompts, responses) of token ids as sampled; 'text': score(questions, responses) of text.
    """

    name: str
    weight: float
    reads: Literal["text", "ids"]
    score: Callable[[list, list], Any]

    def __call__(self, prompts: list, responses: list) -> torch.Tensor:
        """Unweighted scores [B] fp32; ValueError unless there is one finite number for each response."""
        found = self.score(prompts, responses)
        try:
            numbers = torch.as_tensor(found, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(
                f"reward source {self.name!r} must give a list of numbers, one a response, not {reprlib.repr(found)}"
            ) from None
        if numbers.shape != (len(responses),):
            given = " x ".join(map(str, numbers.shape)) or "one"
            raise ValueError(f"reward source {self.name!r} gave {given} numbers for {len(responses)} responses")
        if not numbers.isfinite().all():
            place = int((~numbers.isfinite()).nonzero()[0])
            raise ValueError(
                f"reward source {self.name!r} gave {float(numbers[place])} for response {place + 1} of "
                f"{len(responses)}: every one needs a finite number"
            )
        return numbers


def load_reward_function(
    *, source: str, weight: float, reads: str, template: str, reward_model: Callable[[], Scorer], precision: str
) -> RewardFunction:
    """What an entry of ppo.rewards names, loaded; ValueError in one line when there is no such thing.

    reward_model: gives the reward stage's scorer; called for 'model' only. reads, template: see recipe.RewardSource.
    """
    if source == MODEL:
        return RewardFunction(source, weight, "ids", reward_model())
    if source in MEASURES:
        kind, measure = MEASURES[source]
        return RewardFunction(source, weight, kind, lambda _, responses: [float(measure(response)) for response in responses])
    if ":" in source:
        return RewardFunction(source, weight, reads, _guarded(user_functions.load(source, "rewards")))
    if "/" in source or Path(source).is_dir():
        return RewardFunction(source, weight, "text", PublishedScorer(source, template, precision))
    raise ValueError(
        f"rewards: {source!r} is neither {MODEL!r}, nor a measure ({', '.join(MEASURES)}), nor package.module:function,"
        f" nor a folder or hub id of a classifier"
    )


def _guarded(function: Callable) -> Callable:
    """A user's function gets copies: it must not change the ids that the policy is trained on."""
    def score(prompts: Sequence, responses: Sequence):
        return function(*([item[:] for item in items] for items in (prompts, responses)))
    return score
