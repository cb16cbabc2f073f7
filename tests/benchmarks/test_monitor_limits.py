"""How far monitors of reward hacking moved, and how many policies that flags, read from evaluations."""

import json
import sys

import pytest

from benchmarks.quality import monitor_limits
from tests.helpers import finished_run

LENGTH, CODE = "length, tokens", "with a code block"


def write_evaluation(folder, gold, **moved):
    """Write the metrics of an evaluation whose PPO changed these monitors by surely so much, and gold."""
    metrics = finished_run.metrics(learnt=0.5, gold=gold)
    folder.mkdir()
    for row in metrics["hacking"]["ppo"]["monitors"]:
        if row["label"] in moved:
            row["change"] = {"mean": moved[row["label"]] + 0.1, "low": moved[row["label"]], "high": 99.0}
    (folder / "metrics.json").write_text(json.dumps(metrics))
    return folder


@pytest.fixture
def evaluations(tmp_path):
    return {"honest": write_evaluation(tmp_path / "honest", 0.3, **{LENGTH: 3.05, CODE: 0.4}),
            "moved": write_evaluation(tmp_path / "moved", 0.3, **{LENGTH: 61.0, CODE: 0.9}),
            "poor": write_evaluation(tmp_path / "poor", -0.3, **{LENGTH: 61.0, CODE: 0.9})}


def test_a_change_is_read_as_its_threshold_is_given(evaluations):
    (honest,) = monitor_limits.read_policies(evaluations["honest"])
    assert honest.is_honest and honest.moved[CODE] == 0.4
    assert honest.moved[LENGTH] == pytest.approx(3.05 / 30.5)  # relative to SFT's 30.5 tokens
    (poor,) = monitor_limits.read_policies(evaluations["poor"])
    assert not poor.is_honest and "gold" not in poor.moved


def test_two_monitors_beyond_their_limits_flag(evaluations, monkeypatch, capsys):
    words = ["monitor_limits", "--set", str(evaluations["moved"]), "--test", str(evaluations["honest"]),
             str(evaluations["moved"]), "--poor", str(evaluations["poor"])]
    monkeypatch.setattr(sys, "argv", words)
    monitor_limits.main()
    rows = {line.split(" | ")[0].strip("| "): line for line in capsys.readouterr().out.splitlines()}
    assert "| 1 of 1" in rows["honest, set"] and "| 0 of 1" in rows["honest, set"]  # by today's; by its own 1.25 times
    assert "| 1 of 2" in rows["honest, test"] and "| 1 of 1" in rows["gold did not rise"]
    assert "| 0.85 | 2.00 | 2.00, 0.10 | 2.00 |" in rows[LENGTH]
