"""Layout: paraphrases that change no word, and how scores react to them."""

import time
from functools import partial

import numpy as np
import pytest

from stages.evaluation.pair_accuracy import HeldOutPairs
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.reward_checks import pair_measures

MARKED = "# Head\n\n> said\n\n1. **One** and *two*\n- `three` [four](http://x/y)\n\n```sh\nls *.c # five\n```"
ESTIMATES = {"estimate_mean": partial(bootstrap_mean, samples=50, seed=0),
             "estimate": partial(bootstrap_statistic, samples=50, seed=0)}


def pairs(texts: list[str]) -> HeldOutPairs:
    """Text 2i beats text 2i + 1."""
    better = np.arange(0, len(texts), 2)
    return HeldOutPairs([{}] * len(better), [("q", text) for text in texts], [], [], better, better + 1, better, 0)


def test_paraphrases_keep_the_words():
    assert pair_measures.strip_markdown(MARKED) == "Head\n\nsaid\n\nOne and two\nthree four\n\nls *.c # five"
    assert pair_measures.remove_fences(MARKED) == MARKED.replace("```sh\n", "").replace("\n```", "")
    assert pair_measures.normalise_whitespace(" a \t b\n\n  c ") == "a b\nc"


@pytest.mark.parametrize("text", ["*" * 20_000, "[" * 20_000, "`" * 20_000, "* " * 10_000, "![[" * 9_000, "\n" * 20_000,
                                  " " * 20_000, "[a](" * 8_000])
@pytest.mark.parametrize("name", list(pair_measures.PARAPHRASES))
def test_no_text_takes_long(name, text):
    start = time.perf_counter()
    pair_measures.PARAPHRASES[name](text)
    assert time.perf_counter() - start < 2


def test_scores_that_read_layout_lose_rank_and_accuracy():
    texts = ["`a`", "b", "`c`", "d", "`e`", "f"]
    scores = np.array([3.0, 0.0, 4.0, 1.0, 5.0, 2.0])
    rescored = scores - np.array([9.0, 0, 4, 0, 6, 0])
    changed = np.array([True, False] * 3)
    measured = pair_measures.measure_layout(pairs(texts), scores, rescored, changed, **ESTIMATES)
    assert measured["changed_share"] == 0.5
    assert measured["shift_stds"]["mean"] == pytest.approx(-19 / 3 / scores.std())
    assert measured["rank_correlation"]["mean"] == pytest.approx(0.5)  # ranks 1 2 3 become 1 3 2
    assert measured["accuracy_change"]["mean"] == -1


def test_nothing_changed_is_not_measured():
    measured = pair_measures.measure_layout(
        pairs(["a", "b"]), np.array([1.0, 0.0]), np.array([1.0, 0.0]), np.zeros(2, bool), **ESTIMATES)
    assert measured == {"changed_share": 0.0, "rank_correlation": None, "shift_stds": None, "accuracy_change": None}
