"""Gold score: a user's function, named in the recipe, that knows the truth of some questions.

    def score(questions: list[str], responses: list[str]) -> dict[str, list[float | None]]

It returns scores under names, `gold` among them (higher is better), and None for a question that it does not know.
"""

from collections.abc import Callable, Sequence

import numpy as np

from stages.evaluation.heldout_prompts import HeldOutPrompts
from stages.evaluation.policy_answers import Answers, repeat_each
from stages.recipe import user_functions

MAIN_KEY = "gold"


def load_gold_scorer(name: str) -> Callable:
    """Load 'package.module:function', also from the current folder; ValueError when there is none."""
    return user_functions.load_function(name, "gold")


def score_gold(function: Callable, questions: list[str], responses: list[str]) -> dict[str, list[float]]:
    """Call a gold scorer and check what it returns: a score a response under each name, NaN where it has none."""
    scores = function(questions, responses)
    if MAIN_KEY not in scores:
        raise ValueError(f"gold: the scorer gives {', '.join(scores) or 'nothing'}, and no {MAIN_KEY!r}")
    for name, values in scores.items():
        if len(values) != len(responses):
            raise ValueError(f"gold: the scorer gives {len(values)} values of {name!r} for {len(responses)} responses")
    return {name: [float("nan") if value is None else float(value) for value in values]
            for name, values in scores.items()}


def score_policies(function: Callable | None, prompts: HeldOutPrompts, answers: dict[str, Answers]
                   ) -> dict[str, dict[str, list[float]]]:
    """Compute every gold score of each policy's answers and, if there are any, of 'human'; nothing without a scorer."""
    texts = {name: sampled.texts for name, sampled in answers.items()}
    texts |= {"human": prompts.best_answers} if prompts.best_answers else {}
    return {name: score_gold(function, repeat_each(prompts.questions, len(responses)), responses)
            for name, responses in texts.items()} if function else {}


def score_main_gold(function: Callable, texts: Sequence[tuple[str, str]]) -> np.ndarray:
    """Compute the gold score [M] of (question, answer) texts; NaN where it is not known."""
    questions, answers = zip(*texts, strict=True) if texts else ((), ())
    return np.array(score_gold(function, list(questions), list(answers))[MAIN_KEY])
