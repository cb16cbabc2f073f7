"""A baseline for the reward model: logistic regression on a few features of an answer's text, and nothing else.

The chance that answer j is better than k is sigmoid(w . (x_j - x_k)): without an intercept, so that the order of the
two does not matter. What this reaches needs no understanding. Shapes: N pairs, M texts, K features.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stages.generation.text_metrics import count_fences, has_code
from stages.reward_modeling.lexical_scorer import fit_bradley_terry

# To add a feature: one line, a function of the answer's text.
FEATURES: dict[str, Callable[[str], float]] = {
    "log characters": lambda text: math.log1p(len(text)),
    "has code": has_code,
    "log code fences": lambda text: math.log1p(count_fences(text)),
    "log inline code": lambda text: math.log1p(len(re.findall(r"(?<!`)`[^`\n]+`", text))),
    "log links": lambda text: math.log1p(len(re.findall(r"https?://", text))),
    "log list items": lambda text: math.log1p(len(re.findall(r"^ *(?:[-*+]|\d+\.) ", text, re.MULTILINE))),
    "log paragraphs": lambda text: math.log1p(text.strip().count("\n\n")),
    "log headings": lambda text: math.log1p(len(re.findall(r"^#+ ", text, re.MULTILINE))),
    "has emphasis": lambda text: "**" in text,
    "question marks": lambda text: math.log1p(text.count("?")),
    "exclamation marks": lambda text: math.log1p(text.count("!")),
}
PENALTY = 1.0  # times |w|^2 / 2, beside a sum over pairs: keeps w finite where one feature tells all pairs apart


@dataclass(frozen=True)
class Surface:
    """Weights of the features [K], each over its standard deviation among the differences it was fitted on."""

    weights: np.ndarray

    def __call__(self, texts: Iterable[str]) -> np.ndarray:
        """Scores [M]: the higher, the likelier the better answer."""
        return features(texts) @ self.weights


def features(texts: Iterable[str]) -> np.ndarray:
    """[M, K] of answers."""
    found = [[float(feature(text)) for feature in FEATURES.values()] for text in texts]
    return np.array(found).reshape(-1, len(FEATURES))


def fit_surface_baseline(rows: Iterable[dict]) -> Surface:
    """The baseline learnt from rows of a pairs table; without a row it scores 0."""
    rows = list(rows)
    if not rows:
        return Surface(np.zeros(len(FEATURES)))
    better, worse = (features(row[name] for row in rows) for name in ("response_j", "response_k"))
    scale = np.sqrt(((better - worse) ** 2).mean(0))
    scale[scale == 0] = 1.0
    return Surface(fit_bradley_terry((better - worse) / scale, PENALTY, solver="newton-cholesky") / scale)
