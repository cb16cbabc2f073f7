"""Measures of a reward model: layouts that change no word, and best-of-n and gold, against hand-computed values."""

import time
from functools import partial

import numpy as np
import pytest

from stages.evaluation.pair_accuracy import HeldOutPairs
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.reward_checks import measures
from stages.reward_checks.measures import best_of_n_curve

MARKED = "# Head\n\n> said\n\n1. **One** and *two*\n- `three` [four](http://x/y)\n\n```sh\nls *.c # five\n```"
ESTIMATES = {"estimate_mean": partial(bootstrap_mean, samples=50, seed=0),
             "estimate": partial(bootstrap_statistic, samples=50, seed=0)}
ESTIMATE = partial(bootstrap_mean, samples=20, seed=0)


def pairs(texts: list[str]) -> HeldOutPairs:
    """Text 2i beats text 2i + 1."""
    better = np.arange(0, len(texts), 2)
    return HeldOutPairs([{}] * len(better), [("q", text) for text in texts], [], [], better, better + 1, better, 0)


def test_paraphrases_keep_the_words():
    assert measures.strip_markdown(MARKED) == "Head\n\nsaid\n\nOne and two\nthree four\n\nls *.c # five"
    assert measures.remove_fences(MARKED) == MARKED.replace("```sh\n", "").replace("\n```", "")
    assert measures.normalise_whitespace(" a \t b\n\n  c ") == "a b\nc"


@pytest.mark.parametrize("text", ["*" * 20_000, "[" * 20_000, "`" * 20_000, "* " * 10_000, "![[" * 9_000, "\n" * 20_000,
                                  " " * 20_000, "[a](" * 8_000])
@pytest.mark.parametrize("name", list(measures.PARAPHRASES))
def test_no_text_takes_long(name, text):
    start = time.perf_counter()
    measures.PARAPHRASES[name](text)
    assert time.perf_counter() - start < 2


def test_scores_that_read_layout_lose_rank_and_accuracy():
    texts = ["`a`", "b", "`c`", "d", "`e`", "f"]
    scores = np.array([3.0, 0.0, 4.0, 1.0, 5.0, 2.0])
    rescored = scores - np.array([9.0, 0, 4, 0, 6, 0])
    changed = np.array([True, False] * 3)
    measured = measures.measure_layout(pairs(texts), scores, rescored, changed, **ESTIMATES)
    assert measured["changed_share"] == 0.5
    assert measured["shift_stds"]["mean"] == pytest.approx(-19 / 3 / scores.std())
    assert measured["rank_correlation"]["mean"] == pytest.approx(0.5)  # ranks 1 2 3 become 1 3 2
    assert measured["accuracy_change"]["mean"] == -1


def test_nothing_changed_is_not_measured():
    measured = measures.measure_layout(
        pairs(["a", "b"]), np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.zeros(2, bool), **ESTIMATES)
    assert measured == {"changed_share": 0.0, "rank_correlation": None, "shift_stds": None, "accuracy_change": None}


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
