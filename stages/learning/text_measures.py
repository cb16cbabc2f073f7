"""What can be said about generated text without a model."""

from collections.abc import Iterable, Sequence

FENCE = "```"


def has_code(text: str) -> bool:
    """Whether a Markdown text holds a fenced block of code."""
    return text.startswith(FENCE) or f"\n{FENCE}" in text


def repetition(tokens: Sequence[int], n: int = 4) -> float:
    """Share of the n-grams of one text that stood in it before, 0 to 1 (Welleck et al. 2020, rep-n)."""
    grams = _grams(tokens, n)
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def distinct(texts: Iterable[Sequence[int]], n: int = 2) -> float:
    """Distinct n-grams of all texts together, over their number, 0 to 1 (Li et al. 2016, distinct-n)."""
    grams = [gram for tokens in texts for gram in _grams(tokens, n)]
    return len(set(grams)) / len(grams) if grams else 0.0


def _grams(tokens: Sequence[int], n: int) -> list[tuple]:
    return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
