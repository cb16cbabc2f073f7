"""Intervals within seeds and over seeds cover what they say they cover."""

import numpy as np
import pytest
from scipy import stats

from stages.pooling.statistics import clip_interval, pool_over_seeds, pool_within_seeds, possible_means

SEEDS, QUESTIONS = 5, 40


def simulate(number: int) -> tuple[list[np.ndarray], float]:
    """Draw the values of each seed, and the mean of what these seeds have in truth; that of all seeds is 1."""
    generator = np.random.default_rng(number)
    truths = generator.normal(1.0, 0.5, SEEDS)
    return [generator.normal(truth, 1.0, QUESTIONS) for truth in truths], float(truths.mean())


def test_each_interval_covers_its_own_truth_and_questions_alone_not_that_of_other_seeds():
    within, within_all, over = [], [], []
    for number in range(300):
        values, truth = simulate(number)
        questions = pool_within_seeds(values, samples=300, seed=number)
        seeds = pool_over_seeds([column.mean() for column in values])
        assert questions["mean"] == pytest.approx(seeds["mean"])
        within.append(questions["low"] <= truth <= questions["high"])
        within_all.append(questions["low"] <= 1.0 <= questions["high"])
        over.append(seeds["low"] <= 1.0 <= seeds["high"])
    assert 0.91 <= np.mean(within) <= 0.98 and 0.91 <= np.mean(over) <= 0.98
    assert np.mean(within_all) < 0.75


def test_the_interval_over_seeds_is_students():
    means = [0.3, 0.1, 0.4]
    actual = pool_over_seeds(means)
    assert (actual["low"], actual["high"]) == pytest.approx(
        stats.t.interval(0.95, 2, loc=np.mean(means), scale=stats.sem(means)))


def test_every_seed_has_the_same_weight_and_what_does_not_apply_is_left_out():
    actual = pool_within_seeds([np.array([0.0, 0.0, 0.0, np.nan]), np.array([1.0])], samples=50, seed=0)
    assert (actual["mean"], actual["low"], actual["high"]) == (0.5, 0.5, 0.5)
    assert (actual["count"], actual["groups"]) == (4, 2)


def test_nothing_to_pool_is_none_and_one_seed_has_no_interval_over_seeds():
    assert pool_within_seeds([np.array([1.0]), np.array([np.nan])], samples=50, seed=0) is None
    assert pool_within_seeds([], samples=50, seed=0) is pool_over_seeds([]) is None
    assert pool_over_seeds([0.5]) == {"mean": 0.5, "low": None, "high": None, "count": 1, "groups": 1}


def test_an_interval_over_seeds_has_only_what_is_possible():
    shares = [np.array([0.0, 0.0, np.nan]), np.array([1.0, 1.0])]
    assert possible_means(shares) == (0, 1)
    assert possible_means([shares[1] - shares[1], -shares[1]]) == (-1, 1)
    assert possible_means([*shares, np.array([0.5])]) == (-np.inf, np.inf)
    actual = clip_interval(pool_over_seeds([np.nanmean(column) for column in shares]), possible_means(shares))
    assert (actual["mean"], actual["low"], actual["high"]) == (0.5, 0, 1)
