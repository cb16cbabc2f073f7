"""Inspection: what an artifact holds, where it comes from and how it differs, of whole and of damaged ones."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.numpy import save_file

from stages import inspect
from stages.artifacts import lineage
from stages.artifacts.artifact import MANIFEST, REQUEST, build, digest, publish
from stages.inspection import artifact_facts
from stages.render.terminal import page_width
from stages.runtime import files
from stages.runtime.files import write_json

ROOT = Path(__file__).parents[2]
EVIL = "\x1b[2J\x1b]0;title\x07 \u202egnp.exe \x9b31m \x7f end"


def make(out: Path, stage: str, inputs: dict[str, Path], config: dict | None = None, metrics: dict | None = None,
         **files: bytes) -> Path:
    """A finished artifact in results/run, with paths as its stage was given them: from the folder around results."""
    given = {name: {"path": str(path.relative_to(out.parents[2])), "sha256": digest(path)}
             for name, path in inputs.items()}
    request = {"stage": stage, "config": config or {"seed": 0}, "inputs": given}
    with build(out, request) as partial:
        for name, content in files.items():
            (partial / name.replace("__", ".")).write_bytes(content)
        publish(partial, out, request | {"metrics": metrics or {}, "seconds": 1.5, "commit": "abc", "versions": {}})
    return out


@pytest.fixture
def run(tmp_path):
    """dump -> posts -> pairs -> sft, as in results/run, with the run's recipe."""
    (tmp_path / "dump.7z").write_text("posts")
    folder = tmp_path / "results" / "run"
    posts = make(folder / "posts", "posts", {"dump": tmp_path / "dump.7z"})
    pairs = make(folder / "pairs", "pairs", {"posts": posts}, {"seed": 42, "min_score_gap": 1})
    make(folder / "sft", "sft", {"pairs": pairs}, {"lora": {"r": 16}, "seed": 0}, {"loss": 0.5, "tokens": 10},
         a__txt=b"abc")
    recipe = {"posts": {"seed": 0}, "pairs": {"seed": 42, "min_score_gap": 1}, "sft": {"lora": {"r": 16}, "seed": 0}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture(autouse=True)
def terminal_of_100_columns(monkeypatch):
    """The width where there is no terminal; a worker of xdist may have one of 80."""
    monkeypatch.setenv("COLUMNS", "100")


def printed(capsys, *arguments: object) -> str:
    """What the command prints, without a failure; a page is as wide as it says, but for paths that are asked for."""
    assert inspect.main([str(argument) for argument in arguments]) == 0
    text, errors = capsys.readouterr()
    assert not errors
    own = [line for line in text.split("\n") if not any(str(path) in line for path in arguments)]
    assert "--json" in arguments or max(map(len, own)) <= page_width()
    return text


def facts(capsys, *arguments: object) -> dict | list:
    return json.loads(printed(capsys, *arguments, "--json"))


def states(capsys, folder: Path) -> dict[str, str]:
    return {stage["name"]: stage["state"] for actual in facts(capsys, folder) for stage in actual["stages"]}


def lines_with(text: str, *words: str) -> list[str]:
    return [line for line in text.split("\n") if all(word in line for word in words)]


# --- ancestry and staleness -----------------------------------------------------------------------------------------


def test_the_ancestry_goes_up_to_the_dump_wherever_one_stands(run, capsys, monkeypatch):
    monkeypatch.chdir("/")
    text = printed(capsys, run / "sft")
    assert [line.split() for line in text.split("ancestry\n")[1].split("\n")[:3]] == [
        ["pairs", digest(run / "pairs")[:12], "same", "results/run/pairs"],
        ["posts", digest(run / "posts")[:12], "same", "results/run/posts"],
        ["dump", digest(run.parents[1] / "dump.7z")[:12], "same", "dump.7z"]]
    assert "stale" not in text and "loss    0.5" in text


def test_an_artifact_is_the_same_from_inside(run, capsys, monkeypatch):
    whole = facts(capsys, run / "sft")
    (run / "recipe.yaml").write_text("sft: {seed: 1}")
    for folder, path in ((run / "sft", "."), (run, "sft"), (run / "pairs", "../sft")):
        monkeypatch.chdir(folder)
        actual = facts(capsys, path)
        assert actual["ancestry"] == whole["ancestry"] and len(actual["stale"]) == 2
    assert states(capsys, Path("..")) == states(capsys, run)


def test_an_artifact_may_be_named_by_its_manifest(run, capsys):
    assert facts(capsys, run / "sft" / MANIFEST) == facts(capsys, run / "sft")


def test_an_input_made_anew_breaks_the_link_and_nothing_is_told_behind_it(run, capsys):
    shutil.rmtree(run / "pairs")
    make(run / "pairs", "pairs", {"posts": run / "posts"}, {"seed": 42, "min_score_gap": 1}, {"pairs": 7})
    text = printed(capsys, run / "sft")
    assert lines_with(text, "stale", "its input pairs, results/run/pairs, has changed")
    assert lines_with(text, "BROKEN: changed") and not lines_with(text, "results/run/posts")
    assert states(capsys, run) == {"posts": "finished", "pairs": "finished", "sft": "stale"}


def test_a_link_broken_further_up_is_shown_where_it_is(run, capsys):
    (run.parents[1] / "dump.7z").write_text("other posts")
    text = printed(capsys, run / "sft")
    assert lines_with(text, "dump", "BROKEN: changed") and len(lines_with(text, "BROKEN")) == 1
    assert states(capsys, run) == {"posts": "stale", "pairs": "finished", "sft": "finished"}


@pytest.mark.parametrize("remove, said", [("pairs", "is gone"), ("pairs/manifest.json", f"has no {MANIFEST}")])
def test_an_input_that_is_gone_or_not_finished(run, capsys, remove, said):
    path = run / remove
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert lines_with(printed(capsys, run / "sft"), "stale", said)


def test_settings_that_are_not_the_recipes_are_stale(run, capsys):
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    recipe["sft"]["lora"]["r"] = 8
    (run / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert lines_with(printed(capsys, run / "sft"), "stale", "sft.lora.r is 16, recipe.yaml says 8")
    assert states(capsys, run)["sft"] == "stale"


def test_a_large_dump_is_not_read_through(run, capsys, monkeypatch):
    monkeypatch.setattr(lineage, "MAX_HASHED_BYTES", 4)
    assert lines_with(printed(capsys, run / "sft"), "dump", "not checked")
    assert states(capsys, run)["posts"] == "finished"


def test_what_comes_from_a_hub_is_not_checked(run, capsys):
    manifest = json.loads((run / "sft" / MANIFEST).read_text())
    manifest["inputs"]["dump"] = [{"path": "owner/name", "sha256": None}]
    write_json(run / "sft" / MANIFEST, manifest)
    assert lines_with(printed(capsys, run / "sft"), "dump[0]", "not checked (from a hub)", "owner/name")


# --- runs -----------------------------------------------------------------------------------------------------------


def test_the_list_has_runs_with_each_stage_after_what_it_was_made_from(run, capsys):
    source = {"path": "results/run/sft", "sha256": digest(run / "sft")}
    with build(run / "reward", {"stage": "reward", "config": {}, "inputs": {"base": source}}) as partial:
        (partial / "traceback.txt").write_text("Traceback ...\nValueError: no pair is left\n")
    make(run.parent / "by-hand" / "share", "pairs", {})
    for name in ("reward.partial", "sft", "pairs", "posts"):  # as a copy may leave them: the newest is the first
        for file in (run / name).iterdir():
            os.utime(file)
    text = printed(capsys, run.parent)
    assert [line.split()[:2] for line in text.split("\n") if line.startswith("  ")] == [
        ["share", "finished"], ["posts", "finished"], ["pairs", "finished"], ["sft", "finished"], ["reward", "partial"]]
    assert lines_with(text, "reward", "its last attempt failed: ValueError: no pair is left")
    assert lines_with(text, "sft", "loss 0.5, tokens 10")


@pytest.mark.parametrize("columns", [80, 100, 200])
def test_the_list_shows_all_numbers_in_a_terminal_of_any_width(run, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    numbers = {f"a_number_{index}": 0.123456 + index for index in range(4)}
    make(run / "ppo", "ppo", {"policy": run / "sft"}, metrics=numbers)
    text = printed(capsys, run)
    assert " ".join(text.split()).endswith(", ".join(f"{name} {value:.6g}" for name, value in numbers.items()))
    assert (max(map(len, text.splitlines())) > 100) == (columns > 100)


def test_a_circle_of_inputs_is_listed(run, capsys):
    for name, other in (("a", "b"), ("b", "a")):
        (run / name).mkdir()
        write_json(run / name / MANIFEST, {"stage": "sft", "inputs": {"base": {"path": f"results/run/{other}"}}})
    assert {"a", "b"} < states(capsys, run).keys()


def test_a_terminal_that_knows_ascii_only_gets_the_page(run):
    make(run / "ppo", "ppo", {}, metrics={"café": 1})
    done = subprocess.run([sys.executable, "-m", "stages.inspect", run], cwd=ROOT, capture_output=True, text=True,
                          env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and r"caf\xe9 1" in done.stdout


def test_shares_of_the_pairs_belong_to_their_run(run, capsys):
    make(run / "pairs-shares" / "1-of-2", "pairs", {"posts": run / "posts"}, {"seed": 42, "min_score_gap": 2})
    assert states(capsys, run.parent)["pairs-shares/1-of-2"] == "stale"  # another gap than the recipe's
    assert len(facts(capsys, run.parent)) == 1


def test_what_was_set_aside_is_called_so(run, capsys):
    for seed in (1, 2):
        with build(run / "ppo", {"stage": "ppo", "config": {"seed": seed}, "inputs": {}}) as partial:
            (partial / "checkpoint").touch()
    assert {"ppo": "partial", "ppo.set-aside-1": "set aside"}.items() <= states(capsys, run).items()


@pytest.mark.parametrize("path, said", [
    ("nothing", "there is no"), ("dump.7z", "is a file"), ("empty", "is no artifact, and there is none in it"),
    ("results/run/ppo", "is not finished: look at")])
def test_a_users_mistake_is_one_line(run, capsys, path, said):
    (run.parents[1] / "empty").mkdir()
    (run / "ppo.partial").mkdir()
    assert inspect.main([str(run.parents[1] / path)]) == 1
    text, errors = capsys.readouterr()
    assert not text and errors.startswith("inspect: error: ") and said in errors and errors.count("\n") == 1


# --- contents -------------------------------------------------------------------------------------------------------


@pytest.fixture
def begun(tmp_path):
    """A .partial of a training: request, history, samples, checkpoints and a table in two parts."""
    folder = tmp_path / "x.partial"
    (folder / "table").mkdir(parents=True)
    write_json(folder / REQUEST, {"stage": "reward", "config": {"seed": 0}, "inputs": {}})
    layers = {f"layers.{n}.q_proj.lora_A.weight": numpy.zeros((4, 8), "float32") for n in range(3)}
    for number in (9, 10):
        (folder / "checkpoints" / f"checkpoint-{number}").mkdir(parents=True)
        save_file(layers | {"score.weight": numpy.zeros((1, 8), "float32")},
                  folder / "checkpoints" / f"checkpoint-{number}" / "adapter_model.safetensors")
    rows = [{"step": 1, "loss": 3.0}, {"step": 2, "validation_accuracy": 0.75}, {"step": 3, "loss": 2.0}]
    (folder / "history.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [{"step": 1, "answer": "old"}, {"step": 3, "answer": EVIL + "long " * 500}]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    for part in range(2):
        table = pa.table({"qid": [10 * part + n for n in range(5)], "text": [None, "a", "abc", EVIL, "x" * 9000],
                          "tags": [["a"], [], ["a", "b"], None, ["c"]]})
        pq.write_table(table, folder / "table" / f"part-0000{part}.parquet")
    return folder


def test_shapes_come_from_the_newest_checkpoint_and_layers_are_counted(begun, capsys):
    weights, = facts(capsys, begun)["weights"]
    assert weights["name"] == "checkpoints/checkpoint-10/adapter_model.safetensors"
    assert weights["parameters"] == 3 * 32 + 8
    assert weights["tensors"] == [
        {"name": "layers.*.q_proj.lora_A.weight", "dtype": "F32", "shape": [4, 8], "count": 3},
        {"name": "score.weight", "dtype": "F32", "shape": [1, 8], "count": 1}]
    assert lines_with(printed(capsys, begun), "3 x  4 x 8  F32  layers.*.q_proj.lora_A.weight")


def test_last_metrics_are_the_newest_of_each_and_the_sample_is_the_last(begun, capsys):
    actual = facts(capsys, begun)
    assert actual["last_metrics"] == {"loss": {"value": 2.0, "step": 3},
                                     "validation_accuracy": {"value": 0.75, "step": 2}}
    assert actual["sample"]["step"] == 3 and len(actual["sample"]["answer"]) == 300


def test_tables_are_described_by_their_first_rows(begun, capsys, monkeypatch):
    monkeypatch.setattr(artifact_facts, "SAMPLE_ROWS", 4)
    table, = facts(capsys, begun)["tables"]
    assert (table["rows"], table["files"], table["sample_rows"], len(table["head"])) == (10, 2, 4, 2)
    qid, text, tags = table["columns"]
    assert qid == {"name": "qid", "type": "int64", "of": "value", "nulls": 0, "least": 0, "most": 3, "mean": 1.5}
    assert (text["of"], text["least"], text["most"], text["nulls"]) == ("characters", 1, len(EVIL), 1)
    assert (tags["of"], tags["least"], tags["most"], tags["mean"], tags["nulls"]) == ("items", 0, 2, 1.0, 1)
    assert lines_with(printed(capsys, begun), "qid", "0 .. 3, mean 1.5")


def test_the_end_of_a_long_series_is_read_alone(tmp_path, monkeypatch):
    lines = [b"not a row", *(b'{"step": %d}' % n for n in range(100)), b'{"text": "\xff"}', b'{"step": 1']
    (tmp_path / "s.jsonl").write_bytes(b"\n".join(lines))
    monkeypatch.setattr(files, "TAIL_BYTES", 76)
    rows = artifact_facts.read_last_rows(tmp_path / "s.jsonl", problems := [])
    assert [row["step"] for row in rows] == [97, 98, 99] and problems == ["s.jsonl: 2 lines at its end are no rows"]


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_no_text_of_a_post_reaches_the_terminal_as_a_command(begun, capsys, flags):
    inputs = {EVIL: {"path": EVIL, "sha256": EVIL}}
    write_json(begun / REQUEST, {"stage": EVIL, "config": {EVIL: EVIL}, "inputs": inputs, "metrics": {EVIL: EVIL},
                                 "device": EVIL, "versions": {"torch": EVIL}})
    (begun / "traceback.txt").write_text(EVIL)
    text = printed(capsys, begun, *flags) + printed(capsys, begun.parent, *flags)
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    assert ("\\u001b[2J" if flags else "\\x1b[2J") in text


def test_no_path_reaches_the_terminal_as_a_command(capsys):
    assert inspect.main([EVIL]) == 1
    assert "\\x1b[2J" in capsys.readouterr().err


# --- damage ---------------------------------------------------------------------------------------------------------


def cut(path: Path, keep_bytes: int) -> None:
    path.write_bytes(path.read_bytes()[:keep_bytes])


def test_a_truncated_manifest_is_told_and_the_rest_is_shown(run, capsys):
    cut(run / "sft" / MANIFEST, 60)
    text = printed(capsys, run / "sft")
    assert lines_with(text, "sft, damaged") and lines_with(text, "problem", "manifest.json cannot be read")
    assert lines_with(text, "pairs", "same", "results/run/pairs")  # from its request, which is whole
    assert states(capsys, run)["sft"] == "damaged"


@pytest.mark.parametrize("said", ["[]", "7", '{"stage": 3, "config": [], "inputs": 5, "metrics": null, "seconds": "x"}',
                                  '{"stage": "sft", "inputs": {"a": 1, "b": [2], "c": {"path": 3, "sha256": 4}}}', ""])
def test_a_manifest_that_holds_something_else(run, capsys, said):
    (run / "sft" / MANIFEST).write_text(said)
    printed(capsys, run / "sft")
    printed(capsys, run)


def test_files_that_are_not_what_the_manifest_lists(run, capsys):
    (run / "sft" / "a.txt").write_text("ab")
    assert lines_with(printed(capsys, run / "sft"), "problem", "a.txt has 2 bytes, manifest.json says 3")
    (run / "sft" / "a.txt").unlink()
    assert lines_with(printed(capsys, run / "sft"), "problem", "a.txt is gone")


@pytest.mark.parametrize("keep_bytes, said, shapes", [
    (4, "cut off in its header", 0), (60, "cut off in its header", 0), (-10, "is not whole", 2)])
def test_half_written_weights(begun, capsys, keep_bytes, said, shapes):
    cut(begun / "checkpoints" / "checkpoint-10" / "adapter_model.safetensors", keep_bytes)
    assert said in " ".join(printed(capsys, begun).split())
    assert len(facts(capsys, begun)["weights"][0]["tensors"]) == shapes
    assert facts(capsys, begun)["tables"][0]["rows"] == 10


@pytest.mark.parametrize("header", [b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": "x"}}', b"\xff", b"{"])
def test_weights_with_another_header(begun, capsys, header):
    (begun / "best.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    assert lines_with(printed(capsys, begun), "problem", "best.safetensors cannot be read")
    (begun / "best.safetensors").write_bytes(b"\xff" * 100)
    assert lines_with(printed(capsys, begun), "problem", "it is not a safetensors file")


def test_half_written_tables(begun, capsys):
    cut(begun / "table" / "part-00001.parquet", -10)
    (begun / "table" / "part-00002.parquet").write_bytes(b"")
    text = printed(capsys, begun)
    assert lines_with(text, "part-00001.parquet cannot be read") and lines_with(text, "part-00002.parquet cannot")
    table, = facts(capsys, begun)["tables"]
    assert table["rows"] == 5 and table["columns"][0]["most"] == 4


def test_half_written_rows(begun, capsys):
    cut(begun / "history.jsonl", -5)
    text = printed(capsys, begun)
    assert lines_with(text, "loss", "3", "step 1") and lines_with(text, "problem", "history.jsonl: 1 lines")


# --- the command ----------------------------------------------------------------------------------------------------


def test_it_starts_without_torch_and_bears_a_reader_that_has_seen_enough(run):
    code = ("import runpy, sys; sys.argv[1:] = [sys.argv[1]]\n"
            "try: runpy.run_module('stages.inspect', run_name='__main__')\n"
            "finally: print({'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules), file=sys.stderr)")
    words = [sys.executable, "-c", code, str(run / "sft")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == "set()\n" and done.stdout
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()
        assert process.stderr.read() == "set()\n"


def test_json_has_no_number_that_json_has_not(run, capsys):
    make(run / "nan", "sft", {}, metrics={"loss": float("nan")})
    assert facts(capsys, run / "nan")["manifest"]["metrics"] == {"loss": "NaN"}
