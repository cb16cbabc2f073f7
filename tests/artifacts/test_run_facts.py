"""What differs between two runs or two artifacts: settings, files by their digests, numbers with intervals."""

import json
import shutil

import pytest
import yaml

from stages import compare
from stages.artifacts.artifact import MANIFEST, build, digest, publish
from stages.artifacts.run_facts import compare_runs
from stages.render.terminal import WIDTH

EVIL = "\x1b[2J\u202e"


def make(out, stage, config, metrics, inputs=(), **files):
    given = {path.name: {"path": str(path), "sha256": digest(path)} for path in inputs}
    request = {"stage": stage, "config": config, "inputs": given}
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


def tables(*folders) -> dict[str, list[list[str]]]:
    """The rows of each table, without the head."""
    return {title: rows for title, (_, *rows) in compare_runs(compare.read_runs(list(folders))).items()}


def printed(capsys, *folders) -> str:
    assert compare.main([str(folder) for folder in folders]) == 0
    text, errors = capsys.readouterr()
    assert not errors
    return text


def test_two_runs_are_compared_by_settings_files_and_numbers(runs):
    shown = tables(*runs)
    assert shown["Settings"] == [["ppo.learning_rate", "1e-05", "2e-05"]] and "Code and inputs" not in shown
    files = {name: (a, b, differing) for name, a, b, differing in shown["Artifacts"]}
    assert [name for name, (a, b, _) in files.items() if a == b] == ["pairs", "sft-merged"]
    assert {name: differing for name, (_, _, differing) in files.items() if differing} == {
        "ppo": "weights", "evaluate": "numbers"}
    assert files["report"][1:] == ("–", "")
    assert shown["Numbers"] == [["evaluate: win rate", "0.25 [0.15, 0.35]", "0.5 [0.4, 0.6]", "0.25"],
                                ["evaluate: prompts", "500", "500", "0"], ["ppo: kl", "0.25", "0.5", "0.25"]]
    assert ["artifacts", "5 finished", "4 finished"] in shown["Runs"]


def test_several_runs_stand_side_by_side(runs, tmp_path):
    third = shutil.copytree(runs[0], tmp_path / "c")
    assert tables(*runs, third)["Numbers"][2] == ["ppo: kl", "0.25", "0.5", "0.25"]


def test_the_text_is_as_wide_as_it_says(runs, capsys):
    lines = [" ".join(line.split()) for line in printed(capsys, *runs).split("\n")]
    assert "evaluate: win rate 0.25 [0.15, 0.35] 0.5 [0.4, 0.6] 0.25" in lines
    assert max(map(len, lines)) <= WIDTH


def test_a_copied_run_has_no_difference(runs, tmp_path):
    shown = tables(runs[0], shutil.copytree(runs[0], tmp_path / "copy"))
    assert "Settings" not in shown and all(a == b and not differing for _, a, b, differing in shown["Artifacts"])


def test_of_two_artifacts_code_and_inputs_are_compared_too(runs, tmp_path):
    for name, rate in (("one", 1), ("two", 2)):
        make(tmp_path / name, "sft", {"lora": {"r": rate}, "seed": 0}, {"loss": rate / 2, "tokens": 10},
             inputs=[runs[0] / "pairs", *[runs[0] / "ppo"] * (rate - 1)])
    shown = tables(tmp_path / "one", tmp_path / "two" / MANIFEST)
    assert shown["Settings"] == [["sft.lora.r", "1", "2"]] and shown["Numbers"] == [["sft: loss", "0.5", "1", "0.5"]]
    assert shown["Code and inputs"] == [["input ppo", "–", digest(runs[0] / "ppo")[:12]]]


def test_the_same_input_elsewhere_is_no_difference(runs, tmp_path):
    for name, run in (("one", runs[0]), ("two", shutil.copytree(runs[0], tmp_path / "copy"))):
        make(tmp_path / name, "sft", {"seed": 0}, {"loss": 1}, inputs=[run / "pairs"])
    assert tables(tmp_path / "one", tmp_path / "two").keys() == {"Runs", "Artifacts"}


@pytest.mark.parametrize("said", [None, "[]", "7", "",
                                  '{"stage": 3, "config": [], "inputs": 5, "metrics": null, "seconds": "x"}',
                                  '{"stage": "sft", "inputs": {"a": 1, "b": [2], "c": {"path": 3, "sha256": 4}}}'])
def test_an_artifact_that_is_unfinished_or_damaged_is_compared_as_far_as_it_is(runs, capsys, said):
    manifest = runs[0] / "ppo" / MANIFEST
    manifest.unlink() if said is None else manifest.write_text(said)
    text = printed(capsys, runs[0] / "ppo", runs[1] / "ppo")
    assert ("1 partial" if said is None else "learning_rate" if "sft" not in said else "1 finished") in text


def test_no_text_of_a_run_reaches_the_terminal_as_a_command(runs, capsys):
    make(runs[0] / "sft", EVIL, {EVIL: EVIL}, {EVIL: 1.0}, ab=EVIL)
    text = printed(capsys, *runs)
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []


@pytest.mark.parametrize("second, said", [
    ("none", "there is no run"), ("", "holds several runs: give one of a, b"), ("empty", "has no finished artifact")])
def test_a_mistake_is_one_line(runs, capsys, tmp_path, second, said):
    (tmp_path / "empty").mkdir()
    assert compare.main([str(runs[0]), str(tmp_path / second)]) == 1
    text, errors = capsys.readouterr()
    assert not text and errors.startswith("compare: error: ") and said in errors and errors.count("\n") == 1
