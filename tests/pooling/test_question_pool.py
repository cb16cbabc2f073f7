"""Intervals over questions and seeds."""

import numpy as np
import pytest
from scipy import stats

from stages.evaluation.statistics import bootstrap_mean
from stages.pooling.statistics import QuestionPool, widen


def test_one_seed_has_the_interval_by_question():
    values = np.random.default_rng(0).normal(size=50)
    estimate = QuestionPool([range(50)], samples=200, seed=3).estimate(values)
    assert estimate["over_seeds"] is None
    assert {key: estimate[key] for key in ("mean", "low", "high", "count", "groups")} == bootstrap_mean(
        values, np.arange(50), samples=200, seed=3)


def test_a_question_of_two_seeds_is_one_group():
    estimate = QuestionPool([["a", "b"], ["b", "a"]], samples=50, seed=0).estimate(np.array([1.0, 2, 3, 4]))
    assert (estimate["count"], estimate["groups"], estimate["mean"]) == (4, 2, 2.5)


def test_the_interval_over_seeds_is_that_of_a_t_test():
    means = [1.0, 1.5, 2.5]
    expected = stats.ttest_1samp(means, 0).confidence_interval(0.95)
    estimate = QuestionPool([["a", "b"]] * 3, samples=50, seed=0).estimate(np.repeat(means, 2))
    assert estimate["over_seeds"] == pytest.approx({"low": expected.low, "high": expected.high})
    assert [estimate["low"], estimate["high"]] == pytest.approx([expected.low, expected.high]), "questions all agree"


def test_the_interval_over_seeds_contains_the_truth_as_often_as_it_says():
    """Seeds shift all their questions, so an interval by question alone is far too narrow."""
    generator, inside, inside_by_question = np.random.default_rng(0), [], []
    for _ in range(150):
        shared, values = generator.normal(0, 1, 40), []
        for _ in range(4):
            values.append(shared + generator.normal(0, 0.4) + generator.normal(0, 0.5, 40))
        estimate = QuestionPool([range(40)] * 4, samples=100, seed=0).estimate(np.concatenate(values))
        inside.append(estimate["low"] < 0 < estimate["high"])
        inside_by_question.append(estimate["by_question"]["low"] < 0 < estimate["by_question"]["high"])
    assert np.mean(inside) >= 0.93
    assert np.mean(inside_by_question) < 0.9, "else the test shows nothing"


def test_an_interval_for_21_comparisons_is_that_of_normal_errors_at_1_minus_5_percent_in_21():
    estimate = {"mean": 1.0, "low": 1.0 - 1.959964, "high": 1.0 + 2 * 1.959964}
    half = stats.norm.ppf(1 - 0.05 / 42)
    assert widen(estimate, 21) == pytest.approx({"mean": 1.0, "low": 1 - half, "high": 1 + 2 * half})
    assert widen(estimate, 1) == pytest.approx(estimate)
    assert widen(None, 3) is None


def test_nothing_where_no_score_applies():
    pool = QuestionPool([range(3)], samples=10, seed=0)
    assert pool.estimate(np.full(3, np.nan)) is None
    assert pool.estimate(np.array([1, np.nan, 3]))["count"] == 2


def test_the_intervals_of_a_share_are_within_0_and_1():
    estimate = QuestionPool([range(4)] * 2, samples=50, seed=0).estimate(np.array([0.0] * 5 + [1] * 3))
    assert (estimate["mean"], estimate["low"], estimate["high"]) == (0.375, 0, 1)
    assert estimate["over_seeds"] == {"low": 0, "high": 1}
