"""Estimate means, and functions of means, with 95 % intervals.

Pairs of one question are not independent, so whole questions are resampled. NaN stands for "does not apply" and is left
out.
"""

from collections.abc import Callable

import numpy as np

LEVEL = 0.95
NORMAL_QUANTILE = 1.959964  # of (1 + LEVEL) / 2
MAX_DRAWS_IN_MEMORY = 2_000_000  # group numbers of a bootstrap


def pair_wins(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return 1 where `one` is larger, 0 where it is smaller, 1/2 for a tie, NaN where either is NaN; all [N]."""
    one, other = np.asarray(one, float), np.asarray(other, float)
    return np.where(np.isnan(one) | np.isnan(other), np.nan, (np.sign(one - other) + 1) / 2)


def bootstrap_mean(values: np.ndarray, groups: np.ndarray, *, samples: int, seed: int) -> dict | None:
    """Estimate the mean of `values` [N], see `bootstrap_statistic`; for a paired difference pass the differences."""
    values = np.asarray(values, float)
    columns = np.stack([values, np.ones_like(values)])
    return bootstrap_statistic(lambda sums: sums[0] / sums[1], columns, groups, samples=samples, seed=seed)


def bootstrap_statistic(
    statistic: Callable[[np.ndarray], np.ndarray], columns: np.ndarray, groups: np.ndarray, *, samples: int, seed: int
) -> dict | None:
    """Estimate a function of sums over N values, with a 95 % percentile interval (Efron, Tibshirani 1993).

    Whole groups are resampled with replacement, as many as there are. Draws for which the statistic is not defined are
    left out.

    Args:
        statistic: sums of the columns [K, ...] to values [...], such as a ratio or a correlation.
        columns: [K, N].
        groups: number of each value's group [N].
        samples: draws.

    Returns: {mean, low, high, count, groups}, or None when no value applies or the statistic of all is not defined.
        low and high are None with a single group.
    """
    columns, groups = np.asarray(columns, float), np.asarray(groups)
    applies = ~np.isnan(columns).any(0)
    columns, groups = columns[:, applies], groups[applies]
    with np.errstate(divide="ignore", invalid="ignore"):
        whole = float(statistic(columns.sum(1)))
        if not (applies.any() and np.isfinite(whole)):
            return None
        _, numbers = np.unique(groups, return_inverse=True)
        estimate = {"mean": whole, "low": None, "high": None, "count": len(groups), "groups": int(numbers.max()) + 1}
        if estimate["groups"] > 1:
            sums = np.stack([np.bincount(numbers, weights=column) for column in columns])
            drawn = statistic(resample_sums(sums, samples, np.random.default_rng(seed)))
            tail = 100 * (1 - LEVEL) / 2
            estimate["low"], estimate["high"] = map(
                float, np.percentile(drawn[np.isfinite(drawn)], [tail, 100 - tail]))
    return estimate


def flatten_estimates(estimates: dict[str, dict | None]) -> dict[str, float]:
    """Return each mean by its name, and the ends of its interval, where it has one, as NAME_low and NAME_high."""
    return {f"{name}{end}": value[key] for name, value in estimates.items() if value
            for key, end in (("mean", ""), ("low", "_low"), ("high", "_high")) if value[key] is not None}


def jackknife(whole: float, without: np.ndarray) -> dict:
    """Estimate a statistic with a 95 % normal interval from its values [N] `without` each group.

    For a statistic that counts distinct things, which resampling with replacement would bias (Efron, Tibshirani 1993,
    chapter 11).
    """
    count = len(without)
    half = NORMAL_QUANTILE * float(np.sqrt((count - 1) * np.var(without)))
    ends = {"low": whole - half, "high": whole + half} if count > 1 else {"low": None, "high": None}
    return {"mean": whole, **ends, "count": count, "groups": count}


def wilson_interval(share: float, count: int) -> tuple[float, float]:
    """Compute the 95 % interval of a share of `count` independent trials (Wilson 1927).

    For few trials: a bootstrap of trials with one outcome has an interval of zero width.
    """
    extra = NORMAL_QUANTILE**2 / count
    middle, half = share + extra / 2, (extra * share * (1 - share) + extra**2 / 4) ** 0.5
    return (middle - half) / (1 + extra), (middle + half) / (1 + extra)


def resample_sums(sums: np.ndarray, samples: int, generator: np.random.Generator) -> np.ndarray:
    """Resample groups with replacement: `sums` [K, groups] to totals [K, samples]."""
    groups, totals = sums.shape[1], []
    at_once = max(1, MAX_DRAWS_IN_MEMORY // groups)
    for start in range(0, samples, at_once):
        drawn = generator.integers(groups, size=(min(at_once, samples - start), groups))
        totals.append(np.stack([column[drawn].sum(1) for column in sums]))
    return np.concatenate(totals, axis=1)
