"""Intervals by question cover what they say they cover; win rates count ties one half."""

import numpy as np
import pytest

from stages.learning.statistics import estimate, group_numbers, wins


def grouped_pairs(generator: np.random.Generator, questions: int = 80) -> tuple[np.ndarray, np.ndarray]:
    """Right or wrong on 1 to 10 pairs a question; questions differ in how hard they are, by 0.7 on average right."""
    sizes = generator.integers(1, 11, questions)
    groups = np.repeat(np.arange(questions), sizes)
    share = np.repeat(generator.beta(1.4, 0.6, questions), sizes)
    return (generator.random(len(groups)) < share).astype(float), groups


def test_the_interval_by_question_covers_the_truth_95_times_in_100():
    covered = []
    for number in range(300):
        found = estimate(*grouped_pairs(np.random.default_rng(number)), samples=400, seed=number)
        covered.append(found["low"] <= 0.7 <= found["high"])
    assert 0.90 <= np.mean(covered) <= 0.99


def test_pairs_taken_as_independent_would_be_too_sure():
    values, groups = grouped_pairs(np.random.default_rng(1))
    by_question = estimate(values, groups, samples=1000, seed=0)
    by_pair = estimate(values, np.arange(len(values)), samples=1000, seed=0)
    assert by_question["mean"] == by_pair["mean"]
    assert by_question["high"] - by_question["low"] > 1.3 * (by_pair["high"] - by_pair["low"])


def test_the_bootstrap_is_the_plain_loop(monkeypatch):
    monkeypatch.setattr("stages.learning.statistics.DRAWN_AT_ONCE", 7)  # several portions
    values, groups = [1.0, 0.0, 0.5, 1.0, 0.0, 0.0, 1.0], [4, 4, 9, 9, 9, 1, 2]
    found = estimate(np.array(values), np.array(groups), samples=500, seed=3)
    generator, means = np.random.default_rng(3), []
    members = {number: [v for v, g in zip(values, groups, strict=True) if g == number] for number in (1, 2, 4, 9)}
    names = list(members)
    for _ in range(500):
        drawn = [value for place in generator.integers(4, size=4) for value in members[names[place]]]
        means.append(sum(drawn) / len(drawn))
    assert found["mean"] == pytest.approx(sum(values) / 7)
    assert found["low"] == pytest.approx(np.percentile(means, 2.5))
    assert found["high"] == pytest.approx(np.percentile(means, 97.5))
    assert (found["count"], found["groups"]) == (7, 4)


def test_what_does_not_apply_is_left_out():
    values = np.array([1.0, np.nan, 0.0, np.nan])
    assert estimate(values, np.array([1, 2, 3, 3]), samples=50, seed=0) | {"low": 0, "high": 0} == {
        "mean": 0.5, "low": 0, "high": 0, "count": 2, "groups": 2}
    assert estimate(values[[1, 3]], np.arange(2), samples=50, seed=0) is None
    assert estimate(np.array([]), np.array([]), samples=50, seed=0) is None


def test_one_question_says_nothing_about_spread():
    found = estimate(np.array([1.0, 0.0]), np.array([5, 5]), samples=50, seed=0)
    assert (found["mean"], found["low"], found["high"]) == (0.5, None, None)


def test_a_paired_difference_is_surer_than_two_means():
    generator = np.random.default_rng(0)
    before = generator.normal(0, 3, 200)
    after = before + generator.normal(0.5, 0.5, 200)
    paired, alone = (estimate(v, np.arange(200), samples=500, seed=0) for v in (after - before, after))
    assert 0 < paired["low"] < 0.5 < paired["high"]
    assert paired["high"] - paired["low"] < 0.25 * (alone["high"] - alone["low"])


def test_wins_against_a_loop():
    generator = np.random.default_rng(0)
    one, other = generator.integers(0, 4, 300).astype(float), generator.integers(0, 4, 300).astype(float)
    expected = [1.0 if a > b else 0.0 if a < b else 0.5 for a, b in zip(one, other, strict=True)]
    assert wins(one, other).tolist() == expected and 0.5 in expected
    assert wins([1.0, np.nan], [0.0, 0.0]).tolist()[0] == 1.0
    assert np.isnan(wins([1.0, np.nan], [np.nan, 0.0])).all()


def test_equal_keys_are_one_group():
    assert group_numbers([("a", 1), ("b", 1), ("a", 1), ("b", 2)]).tolist() == [0, 1, 0, 2]
