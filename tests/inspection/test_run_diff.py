"""The difference of two runs: settings, stages by the digests of their files, numbers with intervals."""

import json
import shutil

import pytest
import yaml

from stages import inspect
from stages.render.terminal import WIDTH
from stages.runtime.artifact import build, publish

EVIL = "\x1b[2J\u202e"


def make(out, stage, config, metrics, **files):
    request = {"stage": stage, "config": config, "inputs": {}}
    with build(out, request) as partial:
        for name, text in files.items():
            (partial / name).write_text(text)
        publish(partial, out, request | {"metrics": metrics, "seconds": 1.5, "commit": "abc", "versions": {}})


@pytest.fixture
def runs(tmp_path):
    """Two runs of one site whose PPO differs; the second has no report, and other times in its manifests."""
    for name, rate, gain, seconds in (("a", 1e-5, 0.25, 3), ("b", 2e-5, 0.5, 4)):
        run = tmp_path / name
        run.mkdir()
        (run / "recipe.yaml").write_text(yaml.safe_dump({"dump": ["x.7z"], "name": name}))
        make(run / "pairs", "pairs", {"seed": 42}, {"pairs": 1234567}, rows="r")
        make(run / "sft-merged", "merge", {"dtype": "bf16"}, {"largest_output": gain}, weights="w")
        make(run / "ppo", "ppo", {"learning_rate": rate, "seed": 0}, {"kl": gain}, weights=name, c="c")
        make(run / "evaluate", "evaluate", {"seed": 0}, {
            "win_rate": gain, "win_rate_low": gain - 0.1, "win_rate_high": gain + 0.1, "prompts": 500}, numbers=name)
        manifest = json.loads((run / "pairs" / "manifest.json").read_text()) | {"seconds": seconds}
        (run / "pairs" / "manifest.json").write_text(json.dumps(manifest))
    make(tmp_path / "a" / "report", "report", {}, {}, page="p")
    return tmp_path / "a", tmp_path / "b"


def printed(capsys, *arguments: object) -> str:
    assert inspect.main([str(argument) for argument in arguments]) == 0
    text, errors = capsys.readouterr()
    assert not errors
    return text


def test_two_runs_are_compared_by_settings_files_and_numbers(runs, capsys):
    facts = json.loads(printed(capsys, "--diff", *runs, "--json"))
    assert facts["settings"] == [{"name": "ppo.learning_rate", "a": 1e-5, "b": 2e-5}]
    assert {row["name"]: (row["state"], row["files"]) for row in facts["stages"]} == {
        "pairs": ("equal", []), "sft-merged": ("equal", []), "ppo": ("different", ["weights"]),
        "evaluate": ("different", ["numbers"]), "report": ("only in a", [])}
    assert [row["name"] for row in facts["metrics"]] == ["evaluate: win_rate", "evaluate: prompts", "ppo: kl"]
    assert facts["metrics"][0]["a"] == {"mean": 0.25, "low": 0.15, "high": 0.35}
    assert facts["metrics"][0]["difference"] == 0.25


def test_the_page_is_as_wide_as_it_says(runs, capsys):
    text = printed(capsys, "--diff", *runs)
    lines = [" ".join(line.split()) for line in text.split("\n")]
    assert "evaluate: win_rate 0.25 [0.15, 0.35] 0.5 [0.4, 0.6] 0.25" in lines
    assert "evaluate: prompts 500 500 0" in lines and "ppo different 1 files differ: weights" in lines
    assert max(map(len, text.split("\n")[2:])) <= WIDTH


def test_a_copied_run_has_no_difference(runs, capsys, tmp_path):
    shutil.copytree(runs[0], tmp_path / "copy")
    text = printed(capsys, "--diff", runs[0], tmp_path / "copy")
    assert "none differs" in text and "different" not in text and "only in" not in text


def test_no_text_of_a_run_reaches_the_terminal_as_a_command(runs, capsys):
    make(runs[0] / "sft", EVIL, {EVIL: EVIL}, {EVIL: 1.0}, ab=EVIL)
    text = printed(capsys, "--diff", *runs)
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []


@pytest.mark.parametrize("second, said", [
    ("b/ppo", "is an artifact, not a run"), ("none", "there is no run"), ("", "holds several runs: give one of a, b"),
    ("empty", "has no finished artifact")])
def test_a_mistake_is_one_line(runs, capsys, tmp_path, second, said):
    (tmp_path / "empty").mkdir()
    assert inspect.main(["--diff", str(runs[0]), str(tmp_path / second)]) == 1
    text, errors = capsys.readouterr()
    assert not text and errors.startswith("inspect: error: ") and said in errors and errors.count("\n") == 1
