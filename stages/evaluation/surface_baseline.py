"""A baseline for the reward model: logistic regression on a few features of an answer's text, and nothing else.

The chance that answer j is better than k is sigmoid(w . (x_j - x_k)): without an intercept, so that the order of the
two does not matter. What this reaches needs no understanding. Numpy only. Shapes: N pairs, M texts, K features.
"""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from stages.generation.text_metrics import count_fences, has_code

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
STEPS, TOLERANCE = 50, 1e-10


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


def fitted(rows: Iterable[dict]) -> Surface:
    """The baseline learnt from rows of a pairs table; without a row it scores 0."""
    rows = list(rows)
    better, worse = (features(row[name] for row in rows) for name in ("response_j", "response_k"))
    scale = np.sqrt(((better - worse) ** 2).sum(0) / max(1, len(rows)))
    scale[scale == 0] = 1.0
    return Surface(logistic((better - worse) / scale) / scale)


def logistic(differences: np.ndarray) -> np.ndarray:
    """Weights [K] of the highest likelihood, less PENALTY |w|^2 / 2; differences [N, K]: better minus worse answer.

    Newton's method (iteratively reweighted least squares); a step that overshoots is halved.
    """
    weights = np.zeros(differences.shape[1])
    for _ in range(STEPS):
        wrong = 1 / (1 + np.exp(np.clip(differences @ weights, -500, 500)))
        slope = differences.T @ wrong - PENALTY * weights
        curvature = (differences * (wrong * (1 - wrong))[:, None]).T @ differences + PENALTY * np.eye(len(weights))
        step = np.linalg.solve(curvature, slope)
        while _loss(differences, weights + step) > _loss(differences, weights) and np.abs(step).max() > TOLERANCE:
            step = step / 2
        weights = weights + step
        if np.abs(step).max() <= TOLERANCE:
            break
    return weights


def _loss(differences: np.ndarray, weights: np.ndarray) -> float:
    return float(np.logaddexp(0, -(differences @ weights)).sum() + PENALTY * weights @ weights / 2)
