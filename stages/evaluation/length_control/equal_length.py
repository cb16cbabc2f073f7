"""Count how often a policy's answer scores higher than another's: over all questions, and at about equal length.

Shapes: N questions, S samples a question.
"""

from collections.abc import Callable

import numpy as np

from stages.evaluation.length_control.words import SCORES
from stages.evaluation.pair_accuracy import EQUAL_LENGTH
from stages.evaluation.statistics import pair_wins


def compare_answers(policy: dict[str, np.ndarray], other: dict[str, np.ndarray], weights: np.ndarray,
                    estimate: Callable) -> dict[str, dict]:
    """Compare a policy's answers with another's, in every score that both have.

    Args:
        policy: columns [N]: `tokens` and scores. other: the same columns [N S], by question.
        weights: [N, S], the probability that a sample is the other's answer; of best-of-n, that it is the best of n.
        estimate: (statistic, columns [K, N], groups [N]) to a value with its interval.

    Returns: `all` and `equal_length`, each {pairs, and by score the share that the policy wins}; a tie is half a win.
        At equal length are pairs whose lengths in tokens differ by less than EQUAL_LENGTH of the longer; pairs is their
        expected number. A share is None where there is no such pair.
    """
    own, others = policy["tokens"][:, None], other["tokens"].reshape(weights.shape)
    is_equal = np.abs(own - others) < EQUAL_LENGTH * np.maximum(own, others)
    return {name: {"pairs": float(chosen.sum())} | {
        score: _share_of_wins(pair_wins(policy[score][:, None], other[score].reshape(weights.shape)), chosen, estimate)
        for score in SCORES if score in policy and score in other}
        for name, chosen in (("all", weights), ("equal_length", weights * is_equal))}


def _share_of_wins(wins: np.ndarray, weights: np.ndarray, estimate: Callable) -> dict | None:
    """Estimate the weighted share of wins [N, S]; a question without a pair is left out."""
    pairs = weights.sum(1)
    columns = np.stack([(weights * wins).sum(1), np.where(pairs > 0, pairs, np.nan)])
    return estimate(lambda sums: sums[0] / sums[1], columns, np.arange(len(pairs)))
