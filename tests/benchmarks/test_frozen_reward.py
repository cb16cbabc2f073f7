"""The cross-validation of a head on frozen states: folds by question, and a table from a tiny base."""

import sys

import numpy as np

from benchmarks.quality import frozen_reward
from tests.helpers import tiny_models


def test_a_pair_is_scored_by_weights_that_never_saw_its_fold(monkeypatch):
    seen = []
    monkeypatch.setattr(frozen_reward, "fit_weights", lambda rows, *_, free: seen.append(rows[:, 0]) or np.ones(1))
    rows, folds = np.arange(10.0)[:, None], np.arange(10) % frozen_reward.FOLDS
    scores = frozen_reward.score_folds(rows, folds, 1.0, np.arange(10) < 8)
    assert scores.tolist() == rows[:, 0].tolist()
    for fold, used in enumerate(seen):
        assert used.tolist() == [row for row in range(8) if row % frozen_reward.FOLDS != fold]


def test_the_table_has_a_row_for_every_choice_and_states_are_computed_once(tmp_path, monkeypatch, capsys):
    base = tiny_models.save_base(tmp_path / "base")
    tiny_models.save_pairs(tmp_path / "pairs")
    arguments = ["--base", str(base), "--pairs", str(tmp_path / "pairs"), "--cache", str(tmp_path / "cache"),
                 "--layers", "1", "2", "--penalties", "1", "10"]
    monkeypatch.setattr(sys, "argv", ["frozen_reward", *arguments])
    frozen_reward.main()
    first = capsys.readouterr().out.splitlines()
    assert len(first) == 2 + 2 * 2 and first[2].startswith("1 layers, 1, 1")
    monkeypatch.setattr(frozen_reward, "compute_features", None)  # the states are in the cache
    frozen_reward.main()
    assert capsys.readouterr().out.splitlines() == first
