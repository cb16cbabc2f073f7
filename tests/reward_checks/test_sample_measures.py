"""Best-of-n and gold, against hand-computed values."""

from functools import partial

import numpy as np
import pytest

from stages.evaluation.statistics import bootstrap_mean
from stages.reward_checks.sample_measures import best_of_n_curve, gold_above_other_answers

ESTIMATE = partial(bootstrap_mean, samples=20, seed=0)


def test_the_best_of_all_samples_is_the_one_of_the_highest_reward():
    rewards, gold = np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[5.0, 1.0], [3.0, 2.0]])
    one, two = best_of_n_curve(rewards, gold, (2,), ESTIMATE)
    assert one["gold"]["mean"] == pytest.approx(2.75) and one["best_gold"]["mean"] == pytest.approx(2.75)
    assert two["gold"]["mean"] == pytest.approx(2.0) and two["best_gold"]["mean"] == pytest.approx(4.0)
    assert two["gold_gain"]["mean"] == pytest.approx(-0.75) and two["reward"]["mean"] == 1


def test_a_prompt_that_gold_does_not_know_is_left_out():
    curve = best_of_n_curve(np.array([[0.0, 1.0], [1.0, 0.0]]), np.array([[np.nan, 1.0], [3.0, 2.0]]), (2,), ESTIMATE)
    assert [point["gold"]["mean"] for point in curve] == [2.5, 3.0]
    assert [point["best_gold"]["mean"] for point in curve] == [2.5, 3.0]


def test_answers_that_fit_any_question_are_no_knowledge():
    def score(questions, answers):
        return [float(question == answer) for question, answer in zip(questions, answers, strict=True)]

    questions = ["a", "b", "c"]
    assert gold_above_other_answers(score, questions, questions, ESTIMATE)["mean"] == 1
    assert gold_above_other_answers(score, questions, ["a"] * 3, ESTIMATE)["mean"] == 0
    assert gold_above_other_answers(score, ["a"], ["a"], ESTIMATE) is None
