"""The noise ceiling of votes, against a simulation of the stated model."""

from functools import partial

import numpy as np
import pytest

from stages.evaluation.pair_accuracy import HeldOutPairs
from stages.evaluation.statistics import bootstrap_mean
from stages.reward_checks.measures import estimate_noise_ceiling, probability_order_is_right, votes_of_scores
from stages.stackexchange.questions.table import answer_score


def test_scores_are_inverted_to_votes():
    votes = [0, 1, 3, 7, 31]
    assert votes_of_scores(np.array([answer_score(vote, False) for vote in votes])) == pytest.approx(votes)
    assert votes_of_scores(np.array([-1])) == pytest.approx(0)


@pytest.mark.parametrize(("better", "worse"), [(1, 0), (3, 1), (7, 3), (5, 4)])
def test_the_order_is_right_as_often_as_in_draws_of_the_posterior(better, worse):
    """A Poisson rate after a count, under Jeffreys' prior, is Gamma(count + 1/2)."""
    generator = np.random.default_rng(0)
    one, other = (generator.gamma(count + 0.5, size=200_000) for count in (better, worse))
    assert probability_order_is_right(np.array([better]), np.array([worse]))[0] == pytest.approx(
        (one > other).mean(), abs=4e-3)


def test_close_votes_leave_less_to_reach():
    rows = [{"score_j": high, "score_k": low} for high, low in ((1, 0), (2, 1), (3, 0), (4, 1))]
    index = np.arange(4)
    pairs = HeldOutPairs(rows, [], [], [], index, index, index, 0)
    ceiling = estimate_noise_ceiling(pairs, partial(bootstrap_mean, samples=20, seed=0))
    by_gap = ceiling["by_score_gap"]
    assert 0.5 < by_gap["1"]["mean"] < ceiling["all"]["mean"] < by_gap["3+"]["mean"] < 1
    assert by_gap["2"] is None
