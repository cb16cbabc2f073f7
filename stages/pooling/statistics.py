"""Estimate means over several seeds of one recipe, with 95 % intervals.

Two intervals answer two questions. Within seeds: with these models, would other held-out questions have given
another mean? Over seeds: would models that are trained again? Each seed draws its own questions, so that the second
contains the noise of the first. A QuestionPool is for seeds that share questions, and its interval contains both. An
estimate is {mean, low, high, count, groups}, as in evaluation/statistics.py.
"""

from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist

import numpy as np
from scipy.special import stdtrit

from stages.evaluation.statistics import (
    LEVEL,
    NORMAL_QUANTILE,
    bootstrap_mean,
    bootstrap_statistic,
    resample_sums,
)

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


class QuestionPool:
    """The questions of all seeds, one after the other; one that several seeds share is one group of the bootstrap.

    Shapes: M questions.
    """

    def __init__(self, questions: Sequence[Sequence[Hashable]], *, samples: int, seed: int):
        numbers: dict[Hashable, int] = {}
        self.groups = np.array([numbers.setdefault(question, len(numbers)) for of_seed in questions
                                for question in of_seed])
        self.starts = np.cumsum([len(of_seed) for of_seed in questions])[:-1]  # of all seeds but the first
        self.bootstrap = {"samples": samples, "seed": seed}

    def seed_means(self, values: np.ndarray) -> list[float | None]:
        """Return the mean of each seed's values; None where nothing applies."""
        return [None if np.isnan(rows).all() else float(np.nanmean(rows)) for rows in np.split(values, self.starts)]

    def estimate(self, values: np.ndarray) -> dict | None:
        """Estimate the mean of values [M], with a 95 % interval; None where nothing applies.

        With several seeds the interval covers questions and seeds: its half widths are the roots of the sum of squares
        of those of the bootstrap over questions and of Student's interval over the seeds' means. That counts the noise
        of sampling twice, so it is rather too wide.

        Returns: {mean, low, high, count, groups, by_question, over_seeds}; the last two are {low, high} or None.
        """
        estimate = bootstrap_mean(values, self.groups, **self.bootstrap)
        if estimate is None:
            return None
        means = [mean for mean in self.seed_means(values) if mean is not None]
        by_question = {end: estimate[end] for end in ("low", "high")}
        over_seeds = {end: pool_over_seeds(means)[end] for end in ("low", "high")} if len(means) > 1 else None
        if over_seeds and by_question["low"] is not None:
            half, mean = (over_seeds["high"] - over_seeds["low"]) / 2, estimate["mean"]
            estimate |= {"low": mean - float(np.hypot(mean - by_question["low"], half)),
                         "high": mean + float(np.hypot(by_question["high"] - mean, half))}
            estimate, over_seeds = (clip_interval(each, possible_means([values])) for each in (estimate, over_seeds))
        return estimate | {"by_question": by_question, "over_seeds": over_seeds}

    def estimate_statistic(self, statistic: Callable, columns: np.ndarray) -> dict | None:
        """Estimate a function of the columns' means, with a 95 % interval by question.

        Args:
            statistic: means [K, ...] to values [...].
            columns: [K, M]; a question counts where all of them are known.
        """
        rows = np.concatenate([columns, np.ones((1, columns.shape[1]))])
        return bootstrap_statistic(lambda sums: statistic(sums[:-1] / sums[-1]), rows, self.groups, **self.bootstrap)


def widen(estimate: dict | None, comparisons: int) -> dict | None:
    """Widen a 95 % interval so that of so many comparisons all hold with 95 % (Bonferroni, for normal errors).

    For the best of several: it is chosen by the values that are then compared, so an interval for one is too narrow.
    """
    if estimate is None or estimate["low"] is None:
        return estimate
    factor = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * comparisons)) / NORMAL_QUANTILE
    mean = estimate["mean"]
    return estimate | {end: mean + factor * (estimate[end] - mean) for end in ("low", "high")}
