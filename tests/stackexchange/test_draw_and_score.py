"""Test scores, pairs and splits against plain loops."""

import math
import random
import time
from collections import Counter

import pytest

from stages.stackexchange.pairs.draw import assign_split, better_is_later, draw_pairs
from stages.stackexchange.questions.table import answer_score

SHARES = {"finetune": 3.0, "reward": 3.0, "rl": 3.0, "evaluation": 1.8}


@pytest.mark.parametrize("votes, score", [(0, 0), (1, 1), (2, 2), (3, 2), (7, 3), (10, 3), (-5, -1), (-1, -1)])
def test_score_table(votes, score):
    assert answer_score(votes, False) == score
    assert answer_score(votes, True) == (score + 1 if votes >= 0 else -1)


def test_score_is_the_rounded_logarithm():
    assert all(answer_score(votes, False) == round(math.log2(1 + votes)) for votes in range(50_000))


def test_all_pairs_when_they_are_few():
    for scores in ([], [1], [2, 2], [0, 3, 1, 3], [5, -1, 0, 2, 2], [1, 0]):
        expected = {(j, k) for j in range(len(scores)) for k in range(len(scores)) if scores[j] > scores[k]}
        drawn = draw_pairs(scores, 10, 42, "site", 1)
        assert len(drawn) == len(expected) and set(drawn) == expected


def test_drawn_pairs_are_evenly_spread_and_never_repeat():
    scores = [0, 1, 1, 2, 5, 5, -1]
    possible = [(j, k) for j in range(7) for k in range(7) if scores[j] > scores[k]]
    counts = Counter()
    for question in range(4000):
        drawn = draw_pairs(scores, 5, 42, "site", question)
        assert len(set(drawn)) == 5
        counts.update(drawn)
    assert set(counts) == set(possible)
    share = 4000 * 5 / len(possible)
    assert all(abs(count - share) < 5 * math.sqrt(share) for count in counts.values())


def test_the_draw_depends_on_seed_site_and_question_and_on_nothing_else():
    scores = list(range(30))
    drawn = draw_pairs(scores, 10, 42, "a", 1)
    assert drawn == draw_pairs(scores, 10, 42, "a", 1) == [  # as any process on any machine must draw them
        (29, 27), (26, 3), (25, 22), (25, 9), (25, 8), (21, 2), (20, 16), (16, 13), (13, 10), (7, 0)]
    assert all(drawn != draw_pairs(scores, 10, *other) for other in [(43, "a", 1), (42, "b", 1), (42, "a", 2)])


def test_ten_thousand_answers():
    start = time.process_time()
    scores = [i % 50 for i in range(10_000)]
    drawn = draw_pairs(scores, 10, 42, "site", 1)
    assert len(drawn) == 10 and all(j % 50 > k % 50 for j, k in drawn)
    later = draw_pairs(scores, 10, 42, "site", 1, times=range(10_000))
    assert len(later) == 10 and all(j % 50 > k % 50 and j > k for j, k in later)
    assert time.process_time() - start < 1


@pytest.mark.parametrize("limit", [10**6, 5])
def test_the_later_answer_wins_as_in_plain_loops(limit):
    draw = random.Random(0)
    for question in range(300):
        size, gap = draw.randrange(9), draw.choice([1, 1, 2])
        scores = [draw.randrange(5) for _ in range(size)]
        times = [draw.choice([1.0, 2.0, 3.0, math.nan]) for _ in range(size)]
        expected = {(j, k) for j in range(size) for k in range(size)
                    if scores[j] - scores[k] >= gap and times[j] > times[k]}
        drawn = draw_pairs(scores, limit, 42, "site", question, gap, times)
        assert len(drawn) == len(set(drawn)) == min(limit, len(expected)) and set(drawn) <= expected


@pytest.mark.parametrize(("better", "worse", "is_later"), [
    ("2020-01-02T00:00:00.000", "2020-01-01T23:59:59.999", True), ("2020-01-01", "2020-01-01T00:00:00", False),
    ("2020-01-01T12:00:00+02:00", "2020-01-01T09:30:00Z", True), ("", "2020-01-01", False), ("2020", None, False),
    ("2020-01-02", "yesterday", False)])
def test_which_answer_is_later(better, worse, is_later):
    assert better_is_later({"date_j": better, "date_k": worse}) == is_later
    assert not better_is_later({"date_j": worse, "date_k": better})


def test_splits_have_their_shares_and_need_no_order():
    counts = Counter(assign_split("site", number, SHARES, 42) for number in range(20_000))
    for name, share in SHARES.items():
        assert abs(counts[name] / 20_000 - share / 10.8) < 0.02
    assert "rl" not in {assign_split("site", number, SHARES | {"rl": 0.0}, 42) for number in range(1000)}
    moved = [sum(assign_split(*a) != assign_split(*b) for a, b in zip(one, other, strict=True)) for one, other in (
        ([("site", n, SHARES, 42) for n in range(999)], [("site", n, SHARES, 43) for n in range(999)]),
        ([("site", n, SHARES, 42) for n in range(999)], [("other", n, SHARES, 42) for n in range(999)]))]
    assert min(moved) > 500
