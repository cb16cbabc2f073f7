"""Score answers by their words alone: a Bradley-Terry model on hashed counts of words and pairs of neighbouring words.

It serves as a baseline of the evaluation and as the reward source `lexical`. It is fitted anew wherever it is used.
Shapes: N pairs, M texts, K features.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import LogisticRegression

FEATURES = 2**18
TOKENS = r"\w+|[^\w\s]"  # words and single punctuation marks: those of code and formulas count too
PENALTY = 100.0  # of 1 to 2000 the best on held-out pairs of the demo site (0.70) and of six real sites (0.67)
MAX_STEPS = 1000


@dataclass(frozen=True)
class LinearScorer:
    """A function of answers that returns features [M, K], and their weights [K]."""

    features: Callable[[Iterable[str]], np.ndarray | sparse.csr_matrix]
    weights: np.ndarray

    def __call__(self, answers: Iterable[str]) -> np.ndarray:
        """Score answers [M]; a higher score means a better answer."""
        return self.features(answers) @ self.weights


def fit_lexical_scorer(rows: Iterable[dict]) -> LinearScorer:
    """Fit the scorer on rows of a pairs table; without a row it scores 0 everywhere, as an answer without words."""
    rows = list(rows)
    if not rows:
        return LinearScorer(_log_counts, np.zeros(FEATURES))
    better, worse = (_log_counts(row[name] for row in rows) for name in ("response_j", "response_k"))
    return LinearScorer(_log_counts, fit_bradley_terry(better - worse, PENALTY))


def fit_bradley_terry(differences: np.ndarray | sparse.csr_matrix, penalty: float, solver: str = "lbfgs") -> np.ndarray:
    """Fit P(better beats worse) = sigmoid(w . difference) by maximum likelihood, less penalty |w|^2 / 2.

    differences [N, K]: features of the better answer minus those of the worse one, N at least 1. Returns w [K]. There
    is no intercept, so the order of the two answers does not matter.
    """
    stack = np.vstack if isinstance(differences, np.ndarray) else sparse.vstack
    model = LogisticRegression(C=0.5 / penalty, fit_intercept=False, solver=solver, tol=1e-8, max_iter=MAX_STEPS)
    # Every pair enters in both orders, since LogisticRegression needs two classes: twice the loss, half of C.
    model.fit(stack([differences, -differences]), np.repeat([1, 0], differences.shape[0]))
    return model.coef_[0]


def _log_counts(texts: Iterable[str]) -> sparse.csr_matrix:
    vectorizer = HashingVectorizer(
        n_features=FEATURES, ngram_range=(1, 2), token_pattern=TOKENS, alternate_sign=False, norm=None)
    return vectorizer.transform(texts).log1p()
