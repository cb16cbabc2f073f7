"""Baseline for the reward model: logistic regression on a few surface features of the answer.

The probability that answer j is better than k is sigmoid(w . (x_j - x_k)), without an intercept, so that the order of
the two does not matter. Shapes: M texts, K features.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stages.generation.text_metrics import count_fences, has_code
from stages.reward_modeling.lexical_scorer import fit_bradley_terry

# To add a feature: a line here, a function of the answer's text.
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
PENALTY = 1.0  # times |w|^2 / 2, added to the sum over pairs: keeps w finite where one feature separates all pairs


@dataclass(frozen=True)
class SurfaceBaseline:
    """Weights of the features [K], each divided by its root mean square among the differences it was fitted on."""

    weights: np.ndarray

    def __call__(self, texts: Iterable[str]) -> np.ndarray:
        """Score texts [M]: higher is better."""
        return extract_features(texts) @ self.weights


def extract_features(texts: Iterable[str]) -> np.ndarray:
    """Compute the features [M, K] of answers."""
    rows = [[float(feature(text)) for feature in FEATURES.values()] for text in texts]
    return np.array(rows).reshape(-1, len(FEATURES))


def fit_surface_baseline(rows: Iterable[dict]) -> SurfaceBaseline:
    """Fit the baseline on rows of a pairs table; without rows it scores 0."""
    rows = list(rows)
    if not rows:
        return SurfaceBaseline(np.zeros(len(FEATURES)))
    better, worse = (extract_features(row[name] for row in rows) for name in ("response_j", "response_k"))
    scale = np.sqrt(((better - worse) ** 2).mean(0))
    scale[scale == 0] = 1.0
    return SurfaceBaseline(fit_bradley_terry((better - worse) / scale, PENALTY, solver="newton-cholesky") / scale)
