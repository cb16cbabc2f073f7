"""Estimate the accuracy that no scorer can exceed on pairs whose order was taken from noisy votes. Shapes: N pairs.

Model: readers of a question vote for each answer independently and at its own rate, so that vote counts are Poisson,
and all answers are shown equally often. Given the counts v_j and v_k, the share of j in the sum of both rates has the
posterior Beta(v_j + 1/2, v_k + 1/2) (Jeffreys' prior; the conditional test of two Poisson counts, Przyborowski and
Wilenski 1940). A scorer that knows the rates then agrees with the votes with probability P(share > 1/2).

It is a bound: real votes are not independent (early and top answers collect more), which lowers what can be reached.
"""

from collections.abc import Callable

import numpy as np
from scipy.special import betainc

from stages.evaluation.pair_accuracy import SCORE_GAPS, HeldOutPairs

PRIOR = 0.5  # of Jeffreys


def votes_of_scores(scores: np.ndarray) -> np.ndarray:
    """Invert a pair table's score, round(log2(1 + votes)), to votes; below 0: none. Acceptance counts as a doubling."""
    return np.exp2(np.maximum(np.asarray(scores, float), 0)) - 1


def probability_order_is_right(better_votes: np.ndarray, worse_votes: np.ndarray) -> np.ndarray:
    """Compute the probability [N] that the answer with more votes has the higher rate of votes."""
    return betainc(np.asarray(worse_votes, float) + PRIOR, np.asarray(better_votes, float) + PRIOR, 0.5)


def estimate_noise_ceiling(pairs: HeldOutPairs, estimate_mean: Callable) -> dict:
    """Estimate the best accuracy that the votes allow: of all pairs, and by score gap.

    estimate_mean: statistics.bootstrap_mean with samples and seed.
    """
    better, worse = (np.array([row[name] for row in pairs.rows], float) for name in ("score_j", "score_k"))
    right = probability_order_is_right(votes_of_scores(better), votes_of_scores(worse))
    return {"all": estimate_mean(right, pairs.groups), "by_score_gap": {
        name: estimate_mean(np.where((low <= better - worse) & (better - worse <= high), right, np.nan), pairs.groups)
        for name, (low, high) in SCORE_GAPS.items()}}
