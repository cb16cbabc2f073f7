"""The benchmark of memory gives stages options that they take and pairs that they read; it fails above its limit."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory import run
from benchmarks.memory.random_models import save_models, save_pairs
from stages.command_line.command import build_parser
from stages.command_line.option_parser import read_signature
from stages.modeling.adapters import is_adapter, is_reward_adapter
from stages.reward_modeling.scoring_file import load_scoring
from stages.stackexchange.pairs.table import SPLITS, read_pairs

ROOT = Path(__file__).parents[2]


def test_the_stages_take_the_options(tmp_path):
    for stage, *options in run.list_commands(tmp_path).values():
        parsed = vars(build_parser(read_signature(ROOT / f"stages/{stage}.py")).parse_args(list(map(str, options))))
        assert "bf16" in (parsed["set check_precision"] if stage == "merge" else parsed["set precision"])


def test_the_models_and_pairs_are_what_the_stages_read(tmp_path):
    save_pairs(tmp_path, questions=3)
    assert [len(list(read_pairs(tmp_path / "pairs", split))) for split in SPLITS] == [3] * 4
    save_models(tmp_path, layers=1, width=64)
    assert is_adapter(tmp_path / "ppo") and not is_reward_adapter(tmp_path / "ppo")
    assert is_reward_adapter(tmp_path / "reward") and load_scoring(tmp_path / "reward")


@pytest.mark.parametrize(("gib", "code"), [(5.9, 0), (6.1, 1)])
def test_it_fails_above_the_limit(gib, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run"])
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(run, "run_stages", lambda folder: [("merge", 1.0, 2.0), ("evaluate", gib, 3.0)])
    with pytest.raises(SystemExit) as ended:
        run.main()
    assert ended.value.code == code and f"{gib:.2f}" in capsys.readouterr().out
