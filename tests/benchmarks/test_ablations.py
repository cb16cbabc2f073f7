"""Test the benchmark of PPO's settings over seeds: what it averages, what it pairs, and its table."""

import json
from pathlib import Path

import pytest

from benchmarks.quality import ablations
from stages.recipe.schema import override
from stages.recipe.sections.ppo import Ppo


def scores(gold: list[float]) -> dict:
    row = {"gold": gold, "contested_correct": [1.0, None], "complete": [1.0, 0.0], "unwanted": [0.0, 0.0]}
    return {"1": row, "0": row}


def history(folder: Path, explained: list[float]) -> Path:
    rows = [{"iteration": n, "policy_loss": 0.0, "explained_variance": value} for n, value in enumerate(explained, 1)]
    rows += [{"iteration": 2, "validation_kl": 9.0}, {"iteration": len(explained), "validation_kl": 3.0}]
    folder.mkdir()
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_a_change_is_paired_by_question_with_the_same_seed(tmp_path):
    demo, changed = [scores([5.0, 1.0]), scores([4.0, 2.0])], [scores([4.0, 1.0]), scores([2.0, 1.0])]
    adapters = [history(tmp_path / "a", [0.0] * 5 + [0.8] * 10), history(tmp_path / "b", [0.6] * 12)]
    row = ablations.compare(changed, demo, adapters)
    assert row["change"]["mean"] == pytest.approx((-1 + 0 - 2 - 1) / 4)
    assert row["gold, greedy, by seed"] == [2.5, 1.5] and row["iterations"] == [15, 12]
    assert (row["contested_correct"], row["complete"], row["KL"]) == (1.0, 0.5, 3.0)
    assert row["explained"] == pytest.approx(0.7)  # of the last ten iterations
    lines = ablations.format_rows({"as the demo": row, "epochs: 1": row}).splitlines()
    assert "2.50 / 1.50" in lines[2] and "-1.00 [" not in lines[2] and "-1.00 [" in lines[3]


def test_without_a_change_the_policy_is_the_runs_own(tmp_path):
    assert ablations.train(tmp_path / "run", tmp_path / "out", {}) == tmp_path / "run/ppo"
    assert not (tmp_path / "out").exists()


def test_every_change_is_one_that_the_recipe_accepts():
    for change in ablations.CHANGES.values():
        changed = override(Ppo(), change, "a change", from_text=False)
        assert {name: getattr(changed, name) for name in change} == change
