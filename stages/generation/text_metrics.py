"""Metrics of generated text that need no model: code blocks, repetition, diversity."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

FENCE = "```"


def has_code(text: str) -> bool:
    """Check whether a Markdown text contains a fenced code block."""
    return text.startswith(FENCE) or f"\n{FENCE}" in text


def count_fences(text: str) -> int:
    """Count code fences anywhere in a text: a policy that is rewarded for them need not start a line with each."""
    return text.count(FENCE)


def repetition(tokens: Sequence[int]) -> float:
    """Compute the share of a text's 4-grams that occurred in it before, 0 to 1 (rep-n, Welleck et al. 2020)."""
    grams = _ngrams(tokens, 4)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Sequence[Sequence[int]], n: int = 2) -> float:
    """Divide the distinct n-grams of all texts together by their number, 0 to 1 (distinct-n, Li et al. 2016)."""
    grams = [gram for tokens in texts for gram in _ngrams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def distinct_leave_one_out(texts: Sequence[Sequence[int]], n: int = 2) -> np.ndarray:
    """Compute `distinct` without each of the texts in turn, [N]."""
    grams = [Counter(_ngrams(tokens, n)) for tokens in texts]
    total: Counter = sum(grams, Counter())
    unique = np.array([sum(total[gram] == count for gram, count in counts.items()) for counts in grams], float)
    rest = total.total() - np.array([counts.total() for counts in grams])
    return (len(total) - unique) / np.maximum(rest, 1)


def _ngrams(tokens: Sequence[int], n: int) -> list[tuple]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
