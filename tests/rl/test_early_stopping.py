"""Rules that stop a run, each with its reason (failures 25 and 26, CORRECTNESS P12, P16)."""

import json
import math
from dataclasses import fields

import pytest

from stages.recipe.sections.ppo import Ppo
from stages.rl.early_stopping import EarlyStopping, StopRules

NAN = math.nan
OFF = {"max_kl_nats": 10.0, "patience_evaluations": None}


def make_stopping(**rules):
    return EarlyStopping(StopRules(**OFF | rules))


def evaluate(stopping, *scores, kl=1.0):
    return [stopping.check_evaluation({"kl": kl, "selection_score": score}) for score in scores]


def test_rules_that_are_off_never_stop():
    stopping = make_stopping()
    assert evaluate(stopping, 1.0, *[0.0] * 50) == [True] + [False] * 50
    assert stopping.reason is None


@pytest.mark.parametrize(("kl", "keep"), [(-2.0, True), (10.0, True), (10.1, False), (math.inf, False), (NAN, False)])
def test_a_policy_beyond_the_kl_stops_the_run_and_is_never_kept(kl, keep):
    stopping = make_stopping()
    assert evaluate(stopping, 99.0, kl=kl) == [keep]
    assert (stopping.reason is None) is keep and stopping.best_score == (99.0 if keep else None)
    assert keep or stopping.reason == f"the KL on held-out prompts, {kl:.3g} nats a response, is above max_kl_nats (10)"


def test_patience_counts_evaluations_since_the_best():
    stopping = make_stopping(patience_evaluations=3)
    assert evaluate(stopping, 1.0, 0.5, 1.0, 1.1, 0.0, 1.1) == [True, False, False, True, False, False]
    assert stopping.reason is None and stopping.best_score == 1.1
    assert evaluate(stopping, NAN) == [False]
    assert stopping.reason == "no better selection_score than 1.1 in patience_evaluations (3) evaluations"


def test_a_score_of_nan_is_never_the_best():
    stopping = make_stopping(patience_evaluations=2)
    assert evaluate(stopping, NAN) == [False] and stopping.best_score is None
    assert evaluate(stopping, -5.0, NAN) == [True, False] and stopping.reason is None
    worst = make_stopping(patience_evaluations=1)
    assert evaluate(worst, NAN) == [False] and worst.reason.startswith("no better selection_score than any in")


def test_the_recipe_has_the_rules_and_the_published_run_none_but_the_kl():
    assert {field.name: getattr(Ppo(), field.name) for field in fields(StopRules)} == OFF


def test_the_first_reason_stays():
    stopping = make_stopping(patience_evaluations=1)
    evaluate(stopping, 1.0, 0.0)
    first = stopping.reason
    evaluate(stopping, 1.0, kl=99.0)
    assert stopping.reason == first is not None


def test_a_run_goes_on_from_its_state_as_if_uninterrupted():
    whole, parts = make_stopping(patience_evaluations=3), make_stopping(patience_evaluations=3)
    for score in (1.0, 0.5, 0.6, 0.7):
        for stopping in (whole, parts):
            evaluate(stopping, score)
        state = json.loads(json.dumps(parts.state(), allow_nan=False))
        parts = EarlyStopping.restore(parts.rules, state | {"skipped_in_a_row": 2})  # of an earlier version
        assert parts == whole
    assert whole.reason == "no better selection_score than 1 in patience_evaluations (3) evaluations"
