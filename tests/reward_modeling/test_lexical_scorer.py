"""The scorer of word counts: the right counts, the minimum of the loss, and independence of the order of a pair."""

import json
import math
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from scipy.optimize import minimize

from stages import reward
from stages.recipe.sections.reward import Reward
from stages.reward_modeling.lexical_scorer import (
    FEATURES,
    _log_counts,
    fit_bradley_terry,
    fit_lexical_scorer,
)
from stages.reward_modeling.load import load_classifier
from stages.reward_modeling.scoring_file import SCORING
from tests.helpers import tiny_models

ROWS = [{"response_j": f"use the flag {i}", "response_k": f"no idea, sorry {i % 3}"} for i in range(30)]


def test_words_and_pairs_of_words_are_counted():
    text = "Use x[0] ; use X"
    tokens = ["use", "x", "[", "0", "]", ";", "use", "x"]
    counts = Counter(tokens) + Counter(pairwise(tokens))
    assert sorted(_log_counts([text]).data) == pytest.approx(sorted(math.log1p(n) for n in counts.values()))


def test_the_weights_are_those_of_the_least_loss():
    differences = np.random.default_rng(0).normal(size=(40, 3)) + [1.0, -0.5, 0.0]

    def loss(weights):
        return np.logaddexp(0, -(differences @ weights)).sum() + 2.5 * weights @ weights / 2

    assert np.allclose(fit_bradley_terry(differences, 2.5), minimize(loss, np.zeros(3), tol=1e-12).x, atol=1e-5)


def test_it_learns_words_and_nothing_from_swapped_pairs():
    scorer = fit_lexical_scorer(ROWS)
    good, bad, unknown = scorer(["use the flag", "no idea, sorry", ""])
    assert good > 0 > bad and unknown == 0
    swapped = fit_lexical_scorer([{"response_j": r["response_k"], "response_k": r["response_j"]} for r in ROWS])
    assert np.allclose(swapped.weights, -scorer.weights, atol=1e-8)
    both = [*ROWS, *({"response_j": r["response_k"], "response_k": r["response_j"]} for r in ROWS)]
    assert np.allclose(fit_lexical_scorer(both).weights, 0, atol=1e-8)


def test_it_is_deterministic_and_silent_without_pairs():
    assert np.array_equal(fit_lexical_scorer(ROWS).weights, fit_lexical_scorer(ROWS).weights)
    assert np.array_equal(fit_lexical_scorer([]).weights, np.zeros(FEATURES))
    assert fit_lexical_scorer(ROWS[:1])(["use the flag 0"]) > 0


def test_a_reward_model_trained_with_a_lexical_term_is_refused(tmp_path):
    base, pairs = tiny_models.save_base(tmp_path / "base"), tiny_models.save_pairs(tmp_path / "pairs")
    (tmp_path / "reward").mkdir()
    reward.run(Reward(precision="fp32", epochs=0.2), tmp_path / "reward", base=base, pairs=pairs)
    tiny_models.merge(base, [tmp_path / "reward"], tmp_path / "merged")
    for folder in ("reward", "merged"):
        scoring = json.loads((tmp_path / folder / SCORING).read_text())
        assert "lexical" not in scoring
        (tmp_path / folder / SCORING).write_text(json.dumps(scoring | {"lexical": True}))
    with pytest.raises(ValueError, match="was trained with a lexical term") as error:
        tiny_models.merge(base, [tmp_path / "reward"], tmp_path / "again")
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="was trained with a lexical term"):
        load_classifier(tmp_path / "merged")
    (tmp_path / "merged" / SCORING).write_text(json.dumps(scoring | {"lexical": False}))
    assert load_classifier(tmp_path / "merged")
