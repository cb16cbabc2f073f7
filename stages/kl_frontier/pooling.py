"""Estimate means over questions and, with several seeds, over seeds. Shapes: S seeds, N questions of a seed."""

from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist

import numpy as np

from stages.evaluation.statistics import LEVEL, NORMAL_QUANTILE, bootstrap_mean, bootstrap_statistic
from stages.pooling.statistics import clip_interval, pool_over_seeds, possible_means


class Pool:
    """The questions of all seeds. A question that several seeds share is one group of the bootstrap."""

    def __init__(self, questions: Sequence[Sequence[Hashable]], *, samples: int, seed: int):
        numbers: dict[Hashable, int] = {}
        self.groups = [np.array([numbers.setdefault(question, len(numbers)) for question in of_seed])
                       for of_seed in questions]
        self.samples, self.seed = samples, seed

    def estimate(self, values: Sequence[np.ndarray]) -> dict | None:
        """Estimate the mean of values, one array [N] a seed, with a 95 % interval; None where nothing applies.

        With several seeds the interval covers questions and seeds: its half widths are the roots of the sum of squares
        of those of the bootstrap over questions and of Student's interval over the seeds' means. That counts the noise
        of sampling twice, so it is rather too wide.

        Returns: {mean, low, high, count, groups, by_question, over_seeds}; the last two are {low, high} or None.
        """
        means = [float(np.nanmean(rows)) for rows in values if not np.isnan(rows).all()]
        if not means:
            return None
        estimate = bootstrap_mean(np.concatenate(values), np.concatenate(self.groups), samples=self.samples,
                                  seed=self.seed)
        by_question = {end: estimate[end] for end in ("low", "high")}
        over_seeds = {end: pool_over_seeds(means)[end] for end in ("low", "high")} if len(means) > 1 else None
        if over_seeds and by_question["low"] is not None:
            half, mean = (over_seeds["high"] - over_seeds["low"]) / 2, estimate["mean"]
            estimate |= {"low": mean - float(np.hypot(mean - by_question["low"], half)),
                         "high": mean + float(np.hypot(by_question["high"] - mean, half))}
            estimate, over_seeds = (clip_interval(each, possible_means(values)) for each in (estimate, over_seeds))
        return estimate | {"by_question": by_question, "over_seeds": over_seeds}

    def estimate_statistic(self, statistic: Callable, columns: Sequence[np.ndarray]) -> dict | None:
        """Estimate a function of the columns' means, with a 95 % interval by question.

        Args:
            statistic: means [K, ...] to values [...].
            columns: [K, N] of each seed; a question counts where all of them are known.
        """
        pooled = np.concatenate(columns, axis=1)
        rows = np.concatenate([pooled, np.ones((1, pooled.shape[1]))])
        return bootstrap_statistic(lambda sums: statistic(sums[:-1] / sums[-1]), rows, np.concatenate(self.groups),
                                   samples=self.samples, seed=self.seed)


def widen(estimate: dict | None, comparisons: int) -> dict | None:
    """Widen a 95 % interval so that of so many comparisons all hold with 95 % (Bonferroni, for normal errors).

    For the best of several: it is chosen by the values that are then compared, so an interval for one is too narrow.
    """
    if estimate is None or estimate["low"] is None:
        return estimate
    factor = NormalDist().inv_cdf(1 - (1 - LEVEL) / (2 * comparisons)) / NORMAL_QUANTILE
    mean = estimate["mean"]
    return estimate | {end: mean + factor * (estimate[end] - mean) for end in ("low", "high")}
