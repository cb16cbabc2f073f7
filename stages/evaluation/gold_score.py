"""A gold score: a function of the user's that knows the truth of some questions, named in the recipe.

    def score(questions: list[str], responses: list[str]) -> dict[str, list[float | None]]

It gives numbers under names, `gold` among them (the higher the better), and None where it knows nothing of a question.
"""

from collections.abc import Callable

from stages.recipe import user_functions

MAIN_KEY = "gold"


def load_gold_scorer(name: str) -> Callable:
    """The function named 'package.module:function', looked for from the current folder too; ValueError without it."""
    return user_functions.load_function(name, "gold")


def score_gold(function: Callable, questions: list[str], responses: list[str]) -> dict[str, list[float]]:
    """The function's numbers, a list of the responses' length under each name; NaN where it does not apply."""
    found = function(questions, responses)
    if MAIN_KEY not in found:
        raise ValueError(f"gold: the scorer gives {', '.join(found) or 'nothing'}, and no {MAIN_KEY!r}")
    for name, values in found.items():
        if len(values) != len(responses):
            raise ValueError(f"gold: the scorer gives {len(values)} values of {name!r} for {len(responses)} responses")
    return {name: [float("nan") if value is None else float(value) for value in values]
            for name, values in found.items()}
