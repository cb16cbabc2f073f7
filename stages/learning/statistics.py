"""Means with honest intervals: pairs of one question are not independent, so whole questions are resampled.

NaN stands for "does not apply" and is left out. Numpy only.
"""

from collections.abc import Hashable, Iterable

import numpy as np

LEVEL = 0.95
DRAWN_AT_ONCE = 2_000_000  # group numbers in memory during a bootstrap


def wins(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """1 where `one` is larger, 0 where it is smaller, 1/2 for a tie, NaN where either is NaN; all [N]."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    return np.where(np.isnan(one) | np.isnan(other), np.nan, (np.sign(one - other) + 1) / 2)


def group_numbers(keys: Iterable[Hashable]) -> np.ndarray:
    """Equal keys to equal whole numbers [N], in order of first appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)


def estimate(values: np.ndarray, groups: np.ndarray, *, samples: int, seed: int) -> dict | None:
    """Mean of `values` [N] with a 95 % percentile interval from resampling whole `groups` (Efron, Tibshirani 1993).

    Each of `samples` draws takes as many groups as there are, with replacement, and averages all their values. A paired
    difference is the estimate of the differences. None when no value applies; low and high are None with one group,
    which says nothing about spread.
    """
    values, groups = np.asarray(values, float), np.asarray(groups)
    values, groups = values[~np.isnan(values)], groups[~np.isnan(values)]
    if not len(values):
        return None
    _, numbers = np.unique(groups, return_inverse=True)
    counts = np.bincount(numbers)
    found = {"mean": float(values.mean()), "low": None, "high": None, "count": len(values), "groups": len(counts)}
    if len(counts) > 1:
        means = _resampled_means(np.bincount(numbers, weights=values), counts, samples, np.random.default_rng(seed))
        tail = 100 * (1 - LEVEL) / 2
        found["low"], found["high"] = map(float, np.percentile(means, [tail, 100 - tail]))
    return found


def _resampled_means(sums: np.ndarray, counts: np.ndarray, samples: int, generator: np.random.Generator) -> np.ndarray:
    """Means [samples], each over as many groups, drawn with replacement, as there are."""
    groups, means = len(counts), []
    at_once = max(1, DRAWN_AT_ONCE // groups)
    for start in range(0, samples, at_once):
        drawn = generator.integers(groups, size=(min(at_once, samples - start), groups))
        means.append(sums[drawn].sum(1) / counts[drawn].sum(1))
    return np.concatenate(means)
