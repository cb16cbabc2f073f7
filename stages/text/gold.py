"""A gold score: a function of the user's that knows the truth of some questions, named in the recipe.

    def score(questions: list[str], responses: list[str]) -> dict[str, list[float | None]]

It gives numbers under names, `gold` among them (the higher the better), and None where it knows nothing of a question.
"""

import importlib
import os
import sys
from collections.abc import Callable

MAIN_KEY = "gold"


def load(name: str) -> Callable:
    """The function named 'package.module:function', looked for from the current folder too; ValueError without it."""
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"gold: {name!r} should look like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"gold: cannot load {name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"gold: {name!r} is not a function")
    return found


def scores(function: Callable, questions: list[str], responses: list[str]) -> dict[str, list[float]]:
    """The function's numbers, a list of the responses' length under each name; NaN where it does not apply."""
    found = function(questions, responses)
    if MAIN_KEY not in found:
        raise ValueError(f"gold: the scorer gives {', '.join(found) or 'nothing'}, and no {MAIN_KEY!r}")
    for name, values in found.items():
        if len(values) != len(responses):
            raise ValueError(f"gold: the scorer gives {len(values)} values of {name!r} for {len(responses)} responses")
    return {name: [float("nan") if value is None else float(value) for value in values]
            for name, values in found.items()}
