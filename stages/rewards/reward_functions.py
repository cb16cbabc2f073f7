"""Reward functions: reward models, word counts, measures of the text, the user's functions, published classifiers.

Shapes: B rows, one response each.
"""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from stages.distributed import group
from stages.generation.text_metrics import has_code, repetition
from stages.recipe import user_functions
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING
from stages.rewards.classifier import ClassifierScorer
from stages.stackexchange.pairs.table import read_pairs, sample_rows

MODEL, LEXICAL = "model", "lexical"
LEXICAL_PAIRS = 20_000  # of the reward split, at most
# To add a measure: one line with what it reads of a response, and the function.
MEASURES: dict[str, tuple[Literal["text", "ids"], Callable]] = {
    "repetition": ("ids", repetition),
    "has_code": ("text", has_code),
    "response_tokens": ("ids", len),
    "response_characters": ("text", len),
}


@dataclass(frozen=True)
class RewardFunction:
    """A named scorer.

    reads: 'ids', score(prompts, responses) of token ids as sampled; 'text', score(questions, responses) of text.
    part: term of the reward; the scores of one part are combined to one. Default: a part for this function alone.
    """

    name: str
    weight: float
    reads: Literal["text", "ids"]
    score: Callable[[list, list], Any]
    part: str = ""

    def __post_init__(self):
        object.__setattr__(self, "part", self.part or self.name)

    def __call__(self, prompts: list, responses: list) -> torch.Tensor:
        """Compute unweighted scores [B] fp32; ValueError unless there is one finite number per response.

        Models share the rows among the processes. All else is computed by the first process for all: a user's function
        may call a service, or be random.
        """
        if isinstance(self.score, Scorer | ClassifierScorer):
            return self._numbers(prompts, responses)
        numbers = self._numbers(prompts, responses) if group.rank() == 0 else torch.zeros(len(responses))
        return group.sum_tensor(numbers)

    def _numbers(self, prompts: list, responses: list) -> torch.Tensor:
        scores = self.score(prompts, responses)
        try:
            numbers = torch.as_tensor(scores, dtype=torch.float32).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise ValueError(f"reward source {self.name!r} must return a list of numbers, one per response, not "
                             f"{reprlib.repr(scores)}") from None
        if numbers.shape != (len(responses),):
            shape = " x ".join(map(str, numbers.shape)) or "one"
            raise ValueError(f"reward source {self.name!r} returned {shape} numbers for {len(responses)} responses")
        if not numbers.isfinite().all():
            first = int((~numbers.isfinite()).nonzero()[0])
            raise ValueError(f"reward source {self.name!r} returned {float(numbers[first])} for response {first + 1} "
                             f"of {len(responses)}: every one needs a finite number")
        return numbers


def is_reward_artifact(source: str) -> bool:
    """Check whether a source names reward models of this pipeline: 'model', or the folder of a reward artifact."""
    return source == MODEL or (Path(source) / SCORING).is_file()


def load_reward_functions(
    *,
    source: str,
    weight: float,
    reads: str,
    template: str,
    precision: str,
    pairs: Path | None,
    load_models: Callable[[str], list[Scorer]] | None = None,
) -> list[RewardFunction]:
    """Load what one entry of ppo.rewards names: one function, or one per reward model.

    pairs: the pairs artifact; only 'lexical' reads it. load_models: loads the models of 'model' or of a reward
    artifact's folder; None: there are none. Raises ValueError if nothing has this name.
    """
    if load_models is not None and is_reward_artifact(source):
        scorers = load_models(source)
        names = [source] if len(scorers) == 1 else [f"{source} {number}" for number in range(len(scorers))]
        return [RewardFunction(name, weight, "ids", scorer, part=MODEL)
                for name, scorer in zip(names, scorers, strict=True)]
    if source == LEXICAL:
        from stages.reward_modeling.lexical_scorer import fit_lexical_scorer  # loads scikit-learn
        lexical = fit_lexical_scorer(sample_rows(read_pairs(pairs, "reward"), LEXICAL_PAIRS, seed=0))
        return [RewardFunction(source, weight, "text", lambda _, responses: lexical(responses))]
    if source in MEASURES:
        kind, measure = MEASURES[source]
        return [RewardFunction(source, weight, kind, lambda _, responses: [float(measure(r)) for r in responses])]
    if ":" in source:
        function = _copy_arguments(user_functions.load_function(source, "rewards"))
        return [RewardFunction(source, weight, reads, function)]
    if "/" in source or Path(source).is_dir():
        return [RewardFunction(source, weight, "text", ClassifierScorer(source, template, precision))]
    raise ValueError(
        f"rewards: {source!r} is neither {MODEL!r}, nor {LEXICAL!r}, nor a measure ({', '.join(MEASURES)}), nor "
        f"package.module:function, nor a folder or hub id of a classifier"
    )


def _copy_arguments(function: Callable) -> Callable:
    """Pass copies to a user's function: it must not change the ids that the policy is trained on."""
    def score(prompts: Sequence, responses: Sequence):
        return function(*([item[:] for item in items] for items in (prompts, responses)))
    return score
