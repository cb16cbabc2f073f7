"""Intervals by question cover what they say they cover; win rates count ties one half."""

import numpy as np
import pytest

from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic, jackknife, pair_wins, wilson_interval
from stages.generation.text_metrics import distinct, distinct_leave_one_out
from stages.stackexchange.pairs.table import group_numbers


def grouped_pairs(generator: np.random.Generator, questions: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Right or wrong on 1 to 10 pairs a question; questions differ in how hard they are, by 0.7 on average right."""
    sizes = generator.integers(1, 11, questions)
    groups = np.repeat(np.arange(questions), sizes)
    share = np.repeat(generator.beta(1.4, 0.6, questions), sizes)
    return (generator.random(len(groups)) < share).astype(float), groups


def covers(actual: dict, truth: float) -> bool:
    return actual["low"] <= truth <= actual["high"]


def test_the_interval_by_question_covers_the_truth_95_times_in_100_and_that_by_pair_does_not():
    by_question, by_pair = [], []
    for number in range(300):
        values, groups = grouped_pairs(np.random.default_rng(number))
        by_question.append(covers(bootstrap_mean(values, groups, samples=400, seed=number), 0.7))
        by_pair.append(covers(bootstrap_mean(values, np.arange(len(values)), samples=400, seed=number), 0.7))
    assert 0.92 <= np.mean(by_question) <= 0.98  # 3 standard errors of 300 simulations, less what a bootstrap lacks
    assert np.mean(by_pair) < 0.85


def test_the_interval_of_a_correlation_by_question_covers_the_truth_too():
    """x and y share 0.6 of their variance; each question is three times the same point, and noise of a hundredth."""
    by_question, by_row = [], []
    for number in range(300):
        generator = np.random.default_rng(number)
        shared, *own = generator.normal(size=(3, 100))
        x, y = (np.repeat(np.sqrt(0.6) * shared + np.sqrt(0.4) * part, 3) + generator.normal(0, 0.01, 300)
                for part in own)
        rows = np.stack([np.ones(300), x, y, x * x, y * y, x * y])
        for groups, covered in ((np.repeat(np.arange(100), 3), by_question), (np.arange(300), by_row)):
            covered.append(covers(bootstrap_statistic(correlation, rows, groups, samples=300, seed=number), 0.6))
    assert 0.90 <= np.mean(by_question) <= 0.98 and np.mean(by_row) < 0.85


def correlation(sums: np.ndarray) -> np.ndarray:
    one, x, y, xx, yy, xy = sums
    return (xy / one - x * y / one**2) / np.sqrt((xx / one - (x / one) ** 2) * (yy / one - (y / one) ** 2))


def test_the_jackknife_of_distinct_bigrams_covers_what_they_are_on_average():
    def simulated(seed: int) -> list[list[int]]:
        generator = np.random.default_rng(seed)
        return [generator.integers(30, size=generator.integers(5, 20)).tolist() for _ in range(80)]

    truth = np.mean([distinct(simulated(1000 + seed)) for seed in range(400)])
    texts = [simulated(seed) for seed in range(300)]
    actual = [jackknife(distinct(one), distinct_leave_one_out(one)) for one in texts]
    assert 0.90 <= np.mean([covers(one, truth) for one in actual]) <= 0.99


def test_the_jackknife_of_a_mean_is_its_standard_error():
    values = np.random.default_rng(0).normal(size=50)
    without = (values.sum() - values) / 49
    actual = jackknife(values.mean(), without)
    assert actual["high"] - actual["mean"] == pytest.approx(1.959964 * values.std(ddof=1) / np.sqrt(50))
    assert jackknife(1.0, np.array([1.0])) == {"mean": 1.0, "low": None, "high": None, "count": 1, "groups": 1}


def test_pairs_taken_as_independent_would_be_too_sure():
    values, groups = grouped_pairs(np.random.default_rng(1))
    by_question = bootstrap_mean(values, groups, samples=1000, seed=0)
    by_pair = bootstrap_mean(values, np.arange(len(values)), samples=1000, seed=0)
    assert by_question["mean"] == by_pair["mean"]
    assert by_question["high"] - by_question["low"] > 1.3 * (by_pair["high"] - by_pair["low"])


def test_the_bootstrap_is_the_plain_loop(monkeypatch):
    monkeypatch.setattr("stages.evaluation.statistics.MAX_DRAWS_IN_MEMORY", 7)  # several portions
    values, groups = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0], [4, 4, 9, 9, 9, 1, 2]
    actual = bootstrap_mean(np.array(values), np.array(groups), samples=500, seed=3)
    generator, means = np.random.default_rng(3), []
    members = {number: [v for v, g in zip(values, groups, strict=True) if g == number] for number in (1, 2, 4, 9)}
    names = list(members)
    for _ in range(500):
        drawn = [value for place in generator.integers(4, size=4) for value in members[names[place]]]
        means.append(sum(drawn) / len(drawn))
    assert actual["mean"] == pytest.approx(sum(values) / 7)
    assert actual["low"] == pytest.approx(np.percentile(means, 2.5))
    assert actual["high"] == pytest.approx(np.percentile(means, 97.5))
    assert (actual["count"], actual["groups"]) == (7, 4)


def test_what_does_not_apply_is_left_out():
    values = np.array([1.0, np.nan, 0.0, np.nan])
    assert bootstrap_mean(values, np.array([1, 2, 3, 3]), samples=50, seed=0) | {"low": 0, "high": 0} == {
        "mean": 0.5, "low": 0, "high": 0, "count": 2, "groups": 2}
    assert bootstrap_mean(values[[1, 3]], np.arange(2), samples=50, seed=0) is None
    assert bootstrap_mean(np.array([]), np.array([]), samples=50, seed=0) is None


def test_one_question_says_nothing_about_spread():
    actual = bootstrap_mean(np.array([1.0, 0.0]), np.array([5, 5]), samples=50, seed=0)
    assert (actual["mean"], actual["low"], actual["high"]) == (0.5, None, None)


def test_a_paired_difference_is_surer_than_two_means():
    generator = np.random.default_rng(0)
    before = generator.normal(0, 3, 200)
    after = before + generator.normal(0.5, 0.5, 200)
    paired, alone = (bootstrap_mean(v, np.arange(200), samples=500, seed=0) for v in (after - before, after))
    assert 0 < paired["low"] < 0.5 < paired["high"]
    assert paired["high"] - paired["low"] < 0.25 * (alone["high"] - alone["low"])


def test_wins_against_a_loop():
    generator = np.random.default_rng(0)
    one, other = generator.integers(0, 4, 300).astype(float), generator.integers(0, 4, 300).astype(float)
    expected = [1.0 if a > b else 0.0 if a < b else 0.5 for a, b in zip(one, other, strict=True)]
    assert pair_wins(one, other).tolist() == expected and 0.5 in expected
    assert pair_wins([1.0, np.nan], [0.0, 0.0]).tolist()[0] == 1.0
    assert np.isnan(pair_wins([1.0, np.nan], [np.nan, 0.0])).all()


def test_equal_keys_are_one_group():
    assert group_numbers([("a", 1), ("b", 1), ("a", 1), ("b", 2)]).tolist() == [0, 1, 0, 2]


@pytest.mark.parametrize(("share", "count"), [(0.5, 10), (0.3, 7), (0.9, 200), (0.0, 1), (1.0, 20)])
def test_wilsons_bounds_are_where_the_observed_share_is_just_not_rejected(share, count):
    """By its definition: the share lies 1.96 standard errors of a bound from it, errors taken at the bound."""
    low, high = wilson_interval(share, count)
    for bound in (low, high):
        assert (share - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / count, abs=1e-9)
    assert -1e-12 <= low <= share <= high <= 1 + 1e-12 and high - low > 0.05
