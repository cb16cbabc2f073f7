"""Measure how much of a policy's gain in reward is left between answers of equal length.

This is the non-length reward gain of Singhal et al. 2023 (arXiv 2310.03716): answers are put in bins by their length,
and the difference in mean reward within the bins is compared with the whole difference.
"""

from collections.abc import Callable

import numpy as np

from stages.evaluation.pair_accuracy import EQUAL_LENGTH
from stages.evaluation.statistics import pair_wins

SCORES = ("gold", "judge", "reward")  # by which answers are preferred
BINS = 20  # of equally many answers: of a reward that is length alone they leave some 3 % of the gain (simulated)


def gain_within_bins(before: dict[str, np.ndarray], after: dict[str, np.ndarray], estimate: Callable) -> dict:
    """Compute the gain in reward from one policy to another, and the gain within bins of the length in tokens.

    A bin counts as often as it has answers of both. Bins that only one of them has answers in are left out.

    Args:
        before, after: columns `tokens` and `reward` [N], of answers to the same questions.
        estimate: (statistic, columns [K, N], groups [N]) to a value with its interval.

    Returns: `gain`, `within`: estimates; within is None where no bin has answers of both. `share`: within / gain, None
        unless the interval of gain lies above 0. `overlap`: share of the answers in bins that have answers of both.
        `bins`: [{tokens, before, after, difference}], with the smallest and the largest length and numbers of answers.
    """
    sides, questions = (before, after), np.arange(len(before["reward"]))
    bins = _assign_bins([side["tokens"] for side in sides])
    count = 1 + max(int(numbers.max()) for numbers in bins)
    inside = np.stack([numbers == np.arange(count)[:, None] for numbers in bins]).astype(float)  # [2, bins, N]
    rewards = np.stack([side["reward"] for side in sides])[:, None]
    binned = np.concatenate([inside, inside * rewards]).reshape(4 * count, -1)
    gain = np.stack([after["reward"] - before["reward"], np.ones(len(questions))])
    whole = estimate(_mean, gain, questions)
    share = estimate(lambda sums: _mean_within(sums[:-2]) / _mean(sums[-2:]), np.concatenate([binned, gain]), questions)
    numbers, differences = _summarise(binned.sum(1))
    shared = numbers.all(0)
    return {"gain": whole, "within": estimate(_mean_within, binned, questions),
            "share": share if whole["low"] is not None and whole["low"] > 0 else None,
            "overlap": float(numbers[:, shared].sum() / numbers.sum()),
            "bins": _list_bins(np.concatenate([side["tokens"] for side in sides]), np.concatenate(bins), numbers,
                               np.where(shared, differences, np.nan))}


def _assign_bins(lengths: list[np.ndarray]) -> list[np.ndarray]:
    """Number the bin of each answer, of both policies; a length that many answers have is in one bin."""
    inner = np.linspace(0, 1, BINS + 1)[1:-1]
    edges = np.unique(np.quantile(np.concatenate(lengths), inner))
    return [np.searchsorted(edges, tokens, side="right") for tokens in lengths]


def _mean(sums: np.ndarray) -> np.ndarray:
    return sums[0] / sums[1]


def _mean_within(sums: np.ndarray) -> np.ndarray:
    """Compute the mean difference within bins from sums [4 bins, ...] of answers and rewards, of both policies."""
    numbers, differences = _summarise(sums)
    weights = np.where(numbers.all(0), numbers.sum(0), 0.0)
    return (weights * differences).sum(0) / weights.sum(0)


def _summarise(sums: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the answers in each bin [2, bins, ...], and the difference in mean reward [bins, ...]."""
    sums = sums.reshape(2, 2, -1, *sums.shape[1:])
    numbers = sums[0]
    means = sums[1] / np.maximum(numbers, 1)
    return numbers, means[1] - means[0]


def _list_bins(tokens: np.ndarray, bins: np.ndarray, numbers: np.ndarray, differences: np.ndarray) -> list[dict]:
    return [{"tokens": [int(tokens[bins == index].min()), int(tokens[bins == index].max())],
             "before": int(numbers[0, index]), "after": int(numbers[1, index]),
             "difference": None if np.isnan(differences[index]) else float(differences[index])}
            for index in range(numbers.shape[1]) if numbers[:, index].any()]


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
