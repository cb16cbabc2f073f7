"""Estimate means over several seeds of one recipe, with 95 % intervals.

The two intervals answer two questions. Within seeds: with these models, would other held-out questions have given
another mean? Over seeds: would models that are trained again? Each seed draws its own questions, so that the second
contains the noise of the first. An estimate is {mean, low, high, count, groups}, as in evaluation/statistics.py.
"""

from collections.abc import Sequence

import numpy as np
from scipy.special import stdtrit

from stages.evaluation.statistics import LEVEL, resample_sums

SHARE, DIFFERENCE, UNBOUNDED = (0.0, 1.0), (-1.0, 1.0), (-np.inf, np.inf)  # what a mean can be; difference: of shares


def pool_within_seeds(values: Sequence[np.ndarray], *, samples: int, seed: int) -> dict | None:
    """Estimate the mean of the seeds' means, resampling the questions of each seed (a stratified bootstrap).

    Every seed has the same weight, however many of its questions the values apply to.

    Args:
        values: of each seed, one a question; NaN: does not apply.
        samples: draws of the bootstrap.

    Returns: the estimate; None if the values of any seed apply nowhere.
    """
    known = [column[~np.isnan(column)] for column in (np.asarray(column, float) for column in values)]
    if not known or not all(len(column) for column in known):
        return None
    generator = np.random.default_rng(seed)
    drawn = np.mean([resample_sums(column[None], samples, generator)[0] / len(column) for column in known], axis=0)
    tail = 100 * (1 - LEVEL) / 2
    low, high = map(float, np.percentile(drawn, [tail, 100 - tail]))
    return {"mean": float(np.mean([column.mean() for column in known])), "low": low, "high": high,
            "count": sum(map(len, known)), "groups": len(known)}


def pool_over_seeds(means: Sequence[float]) -> dict | None:
    """Estimate the mean of the seeds' means with Student's t interval; None without any.

    A bootstrap of a few seeds would be too narrow. low and high are None with a single seed.
    """
    means, count = np.asarray(means, float), len(means)
    if not count:
        return None
    estimate = {"mean": float(means.mean()), "low": None, "high": None, "count": count, "groups": count}
    if count > 1:
        half = float(stdtrit(count - 1, (1 + LEVEL) / 2) * means.std(ddof=1) / count**0.5)
        estimate |= {"low": estimate["mean"] - half, "high": estimate["mean"] + half}
    return estimate


def clip_interval(estimate: dict, within: tuple[float, float]) -> dict:
    """End an interval, if there is one, at the least and the largest possible mean."""
    if estimate["low"] is None:
        return estimate
    return estimate | {"low": max(estimate["low"], within[0]), "high": min(estimate["high"], within[1])}


def possible_means(values: Sequence[np.ndarray]) -> tuple[float, float]:
    """Return what the mean can be: of 0 and 1 a share, of -1, 0 and 1 a difference of two, otherwise anything."""
    known = np.concatenate(values)
    known = known[~np.isnan(known)]
    return next((within for within in (SHARE, DIFFERENCE) if np.isin(known, [0, *within]).all()), UNBOUNDED)
