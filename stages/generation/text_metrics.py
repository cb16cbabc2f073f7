"""What can be said about generated text without a model."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

FENCE = "```"


def has_code(text: str) -> bool:
    """Whether a Markdown text holds a fenced block of code."""
    return text.startswith(FENCE) or f"\n{FENCE}" in text


def code_fences(text: str) -> int:
    """Fences in a text, wherever they stand: a policy that is paid for them need not start a line with each."""
    return text.count(FENCE)


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of one text that stood in it before, 0 to 1 (Welleck et al. 2020, rep-n)."""
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Distinct n-grams of all texts together, over their number, 0 to 1 (Li et al. 2016, distinct-n)."""
    grams = [gram for tokens in texts for gram in _grams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def distinct_without_each(texts: Sequence[Sequence[int]], n: int = 2) -> np.ndarray:
    """`distinct` of all the texts but one, for each of them [N]."""
    grams = [Counter(_grams(tokens, n)) for tokens in texts]
    every: Counter = sum(grams, Counter())
    own = np.array([sum(every[gram] == count for gram, count in held.items()) for held in grams], float)
    rest = every.total() - np.array([held.total() for held in grams])
    return (len(every) - own) / np.maximum(rest, 1)


def _grams(tokens: Sequence[int], n: int) -> list[tuple]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
