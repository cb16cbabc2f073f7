"""The diagnosis: each part at fault, from numbers as the program measures them."""

import pytest

from stages.evaluation.pair_accuracy import LOG_PROBABILITY
from stages.reward_checks.diagnosis import diagnose
from tests.helpers.finished_run import around, metrics


def measured(reward: float = 0.72, above: float = 0.1, likelihood: float | None = 0.62,
             gain: float | None = None, kl: float | None = None) -> dict:
    """Metrics of evaluate_reward; None: not measured. All intervals are 0.04 wide."""
    pairs = metrics(above=above)["reward_model"] | {"accuracy": around(reward)}
    pairs["baselines"] = {"longer answer wins": around(0.61)} | (
        {} if likelihood is None else {LOG_PROBABILITY: around(likelihood)})
    pairs["best_cheap_baseline"] = "longer answer wins"
    unchanged = {"changed_share": 0.1, "rank_correlation": around(0.99), "shift_stds": around(0.0),
                 "accuracy_change": around(0.0)}
    point = {"reward": around(0.0), "gold": around(1.0), "gold_gain": around(0.0, 0.0), "best_gold": around(2.0)}
    return {"reward_model": pairs, "noise_ceiling": {"all": around(0.9), "by_score_gap": {}},
            "layout": {"whitespace normalised": unchanged, "markdown stripped": dict(unchanged)},
            "gold_curve": None if gain is None else [point | {"n": 1}, point | {"n": 16, "gold_gain": around(gain)}],
            "policy": None if kl is None else {
                "kl_k1": around(kl), "kl_k3": around(kl), "reward_difference": around(0.0)}}


@pytest.mark.parametrize(("changes", "fault", "words"), [
    ({}, None, "No part is at fault"),
    ({"gain": 0.5, "kl": 3.0}, None, "raises gold"),
    ({"reward": 0.5, "likelihood": 0.5}, "base", "0.500 [0.480, 0.520] of the pairs right, no better than chance"),
    ({"reward": 0.5}, "head", "no better than chance"),
    ({"above": 0.0}, "head", "no better than the best cheap baseline"),
    ({"above": 0.0, "likelihood": None}, "unknown", "--sft FOLDER"),
    ({"gain": 0.0}, "head", "does not raise gold"),
    ({"gain": -0.5}, "head", "lowers gold"),
    ({"gain": 0.0, "likelihood": 0.5}, "base", "no better than chance"),
    ({"kl": 0.01}, "policy", "No: its KL to SFT is 0.010"),
    ({"kl": 0.01, "above": 0.0}, "head", "No: its KL to SFT is 0.010"),
])
def test_names_the_part_at_fault(changes, fault, words):
    diagnosis = diagnose(measured(**changes))
    assert diagnosis["fault"] == fault
    assert words in " ".join(diagnosis["verdict"].values())
    assert 2 <= len(diagnosis["verdict"]) <= 5


def test_says_what_layout_costs():
    numbers = measured()
    assert "Does it read layout?" not in diagnose(numbers)["verdict"]
    numbers["layout"]["markdown stripped"] |= {"shift_stds": around(-0.5), "accuracy_change": around(-0.1)}
    assert "-0.50 [-0.52, -0.48] standard deviations" in diagnose(numbers)["verdict"]["Does it read layout?"]


def test_too_few_pairs_are_unknown():
    numbers = measured()
    numbers["reward_model"]["accuracy"] |= {"low": None, "high": None}
    assert diagnose(numbers)["fault"] == "unknown"
