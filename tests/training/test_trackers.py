"""What is logged while a model trains: the same names and numbers in history.jsonl, TensorBoard and W&B, once each."""

import html
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from stages import dpo, ilql, merge, ppo, reward, sft
from stages.artifacts import lineage
from stages.artifacts.artifact import RunContext, read_manifest
from stages.artifacts.manifest import read_record
from stages.command_line import command
from stages.recipe import checks
from stages.recipe.recipe import Recipe, load_recipe, section_settings
from stages.recipe.schema import SettingsError, to_dict
from stages.recipe.sections.models import Merge
from stages.recipe.sections.ppo import Ppo
from stages.runs.run_folder import resolve_recipe
from stages.runtime.series import append_row, read_rows, truncate_after
from stages.training.loggers import TrainingLogger
from stages.training.trackers import Terminal, WandB, format_markdown
from tests.helpers import tiny_models
from tests.helpers.library_forks import Fork, LibraryForks

pytest.importorskip("tensorboard")
pytest.importorskip("wandb")

ROOT = Path(__file__).parents[2]
EVERYWHERE = ("terminal", "jsonl", "tensorboard", "wandb")
RECIPE = """
log_to: [terminal, jsonl, tensorboard, wandb]
sft: {precision: fp32, sequence_length_tokens: 64, batch_sequences: 2, microbatch_sequences: 1, max_steps: 24,
      learning_rate: 1.0e-3, warmup_steps: 2, save_every_steps: 5, evaluate_every_steps: 4}
reward: {precision: fp32, batch_pairs: 4, microbatch_pairs: 2, learning_rate: 1.0e-3, save_every_steps: 5,
         validation_share: 0.2, members: 2}
dpo: {precision: fp32, batch_pairs: 8, microbatch_pairs: 4, learning_rate: 1.0e-3, warmup_steps: 2, save_every_steps: 5,
      validation_share: 0.2}
ppo: {precision: fp32, iterations: 16, rollout_prompts: 8, minibatch_prompts: 4, microbatch_prompts: 4, epochs: 1,
      max_response_tokens: 8, learning_rate: 1.0e-3, validation_prompts: 8, evaluate_every_iterations: 2,
      save_every_iterations: 5, require_reward: none}
ilql: {precision: fp32, batch_answers: 4, microbatch_answers: 4, max_steps: 12, max_length_tokens: 64,
       evaluate_every_steps: 4}
"""
# Folder of the series: stage.
RUNS = {"sft": "sft", "reward": "reward", "reward/member-1": "reward", "dpo": "dpo", "ilql": "ilql", "ppo": "ppo"}
COUNTS = {"sft": "step", "reward": "step", "dpo": "step", "ilql": "step", "ppo": "iteration"}
HOSTILE = ("<script>alert(1)</script> ![x](http://a/b) **bold**\n</pre><img src=x onerror=alert(2)>\r"
           "    \x1b[31m\x00\u202ered")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run's folder, with sft, reward, dpo and ppo logged to everything."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "recipe.yaml").write_text(RECIPE)
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    recipe, learnt = load_recipe(folder / "recipe.yaml"), {"base": folder / "base", "pairs": folder / "pairs"}
    settings = {name: getattr(recipe, name) for name in COUNTS}
    command.make(sft.run, settings["sft"], folder / "sft", learnt)
    command.make(reward.run, settings["reward"], folder / "reward", learnt)
    judged = {"base": folder / "base", "adapter": [str(folder / "reward")], "pairs": folder / "pairs"}
    command.make(merge.run, Merge(dtype="fp32"), folder / "scorer", judged)
    command.make(dpo.run, settings["dpo"], folder / "dpo", {"policy": folder / "base", "pairs": folder / "pairs"})
    given = {"policy": folder / "base", "reward": folder / "scorer", "pairs": folder / "pairs"}
    command.make(ppo.run, settings["ppo"], folder / "ppo", given)
    command.make(ilql.run, settings["ilql"], folder / "ilql", {"policy": folder / "base", "pairs": folder / "pairs"})
    yield folder
    import wandb

    wandb.teardown()


def points(artifact: Path, stage: str) -> dict[str, list[tuple[int, float]]]:
    """Of each name, its counts and numbers, as the artifact's own files have them."""
    actual: dict[str, list] = {}
    for row in read_rows(artifact / "history.jsonl") + read_rows(artifact / "timing.jsonl"):
        step = row.pop(COUNTS[stage])
        for name, value in row.items():
            actual.setdefault(f"{stage}/{name}", []).append((step, value))
    return actual


def tensorboard(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """As TensorBoard reads its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def wandb(logs: Path, run: str) -> dict[str, list[tuple[int, float]]]:
    """As W&B's own reader shows its offline folder, of which there must be one: `wandb leet inspect` starts it so."""
    from wandb.util import get_core_path

    (folder,) = logs.glob(f"wandb/offline-run-*_*-{run.replace('/', '-')}-{'[0-9a-f]' * 12}")
    (file,) = folder.glob("*.wandb")
    order = [get_core_path(), "leet", "inspect", "--no-observability", "--json", "--run-file", file, folder.parent]
    done = subprocess.run(order, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    actual: dict[str, list] = {}
    for item in (row["history"]["item"] for row in rows if row["type"] == "history"):
        for name, value in item.items():
            if not name.startswith("_") and "/samples." not in name:
                actual.setdefault(name, []).append((item["_step"], value))
    return actual


def as_32_bits(series: dict) -> dict:
    return {name: [(step, float(np.float32(value))) for step, value in rows] for name, rows in series.items()}


@pytest.mark.parametrize("run", RUNS)
def test_tensorboard_reads_just_the_numbers_of_the_artifact(made, run):
    expected = points(made / run, RUNS[run])
    # it keeps no more of a number
    assert expected and tensorboard(made / "logs/tensorboard" / run) == as_32_bits(expected)


@pytest.mark.parametrize("run", RUNS)
def test_wandbs_own_reader_reads_just_the_numbers_of_the_artifact(made, run):
    expected = points(made / run, RUNS[run])
    assert expected and wandb(made / "logs", run) == expected


@pytest.mark.parametrize("run", RUNS)
def test_sample_answers_are_in_all_of_them_at_every_evaluation(made, run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    samples, count = read_rows(made / run / "samples.jsonl"), COUNTS[RUNS[run]]
    evaluated = {row[count] for row in read_rows(made / run / "history.jsonl") if any("validation_" in n for n in row)}
    assert {row[count] for row in samples} == evaluated and len(evaluated) > 2
    reader = EventAccumulator(str(made / "logs/tensorboard" / run), size_guidance={"tensors": 0})
    reader.Reload()
    shown = reader.Tensors(f"{RUNS[run]}/samples/text_summary")
    assert {event.step for event in shown} == evaluated
    (folder,) = (made / "logs/wandb").glob(f"offline-run-*_*-{run.replace('/', '-')}-{'[0-9a-f]' * 12}")
    pages = "".join(page.read_text() for page in (folder / "files/media/html").rglob("*.html"))
    words = "".join(event.tensor_proto.string_val[0].decode() for event in shown)
    scores = [value for row in samples for name, value in row.items() if name.endswith("reward")]
    assert bool(scores) == (run not in ("sft", "ilql"))
    assert all(str(score) in pages and str(score) in words for score in scores)
    assert all(html.escape(row["question"]) in pages and row["question"] in words for row in samples[:8])


def test_a_pair_is_shown_with_the_scores_that_decide_it(made):
    accuracy = {row["step"]: row["validation_accuracy"] for row in read_rows(made / "reward/history.jsonl")
                if "validation_accuracy" in row}
    rows = read_rows(made / "reward/samples.jsonl")
    assert set(rows[0]) == {"step", "question", "better_answer", "better_reward", "worse_answer", "worse_reward",
                            "source"}
    for step in accuracy:
        right = [row["better_reward"] > row["worse_reward"] for row in rows if row["step"] == step]
        assert (len(right) == 8 and all(right)) or accuracy[step] < 1


# --- a killed run ---------------------------------------------------------------------------------------------------


INPUTS = {"sft": {"base": "base", "pairs": "pairs"}, "ppo": {"policy": "base", "reward": "scorer", "pairs": "pairs"}}


def words_of_stage(folder: Path, stage: str, out: str, *flags: str) -> list[str]:
    named = [part for name, value in INPUTS[stage].items() for part in (f"--{name}", str(folder / value))]
    return [f"stages.{stage}", "--recipe", str(folder / "recipe.yaml"), *named, "--out", str(folder / out), *flags]


def environment() -> dict[str, str]:
    """This process's, but not its W&B."""
    return {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}


def start(forks: LibraryForks, folder: Path, stage: str, out: str, *flags: str) -> Fork:
    return forks.start(words_of_stage(folder, stage, out, *flags), environment=environment())


def finished(process: subprocess.Popen | Fork) -> str:
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said[-2000:]
    return said


def last_count(partial: Path, stage: str) -> int:
    """Of the newest whole line of the history."""
    path = partial / "history.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])[COUNTS[stage]] if lines else -1


def kill_behind_a_checkpoint(forks: LibraryForks, folder: Path, stage: str, out: str, mark: str) -> None:
    """When rows are logged that no checkpoint knows."""
    process, partial = start(forks, folder, stage, out), folder / f"{out}.partial"
    deadline = time.monotonic() + 120
    while True:
        saved = [int(actual.parent.name.split("-")[1]) for actual in partial.glob(mark)]
        if saved and last_count(partial, stage) > max(saved):
            break
        assert process.poll() is None and time.monotonic() < deadline, "it ended before it could be killed"
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()


@pytest.mark.parametrize(("stage", "mark"), [("sft", "checkpoints/checkpoint-*/complete.json"),
                                             ("ppo", "checkpoint-*/complete.json")])
def test_killed_and_resumed_every_step_is_there_once(library_forks, made, stage, mark):
    cut = f"{stage}cut"
    kill_behind_a_checkpoint(library_forks, made, stage, cut, mark)
    assert "resumed at" in finished(start(library_forks, made, stage, cut))
    expected = points(made / cut, stage)
    assert tensorboard(made / "logs/tensorboard" / cut) == as_32_bits(expected)
    assert wandb(made / "logs", cut) == expected
    assert all(len({step for step, _ in rows}) == len(rows) for rows in expected.values())
    whole, again = (read_manifest(made / name)["files"] for name in (stage, cut))
    assert whole.pop("timing.jsonl", None) is None or again.pop("timing.jsonl")
    assert whole == again


def test_what_is_logged_to_can_change_in_the_middle_and_changes_nothing(library_forks, made):
    """A run that went to its own files alone goes on into TensorBoard: all of it is there, and the same bits."""
    stage, quiet = "ppo", made / "quiet.yaml"
    quiet.write_text(RECIPE.replace("[terminal, jsonl, tensorboard, wandb]", "[jsonl]"))
    try:
        (made / "recipe.yaml").rename(made / "loud.yaml")
        quiet.rename(made / "recipe.yaml")
        kill_behind_a_checkpoint(library_forks, made, stage, "later", "checkpoint-*/complete.json")
    finally:
        (made / "loud.yaml").rename(made / "recipe.yaml")
    assert not (made / "logs/tensorboard/later").exists()
    assert "resumed at" in finished(start(library_forks, made, stage, "later", "--log-to", "jsonl,tensorboard"))
    assert tensorboard(made / "logs/tensorboard/later") == as_32_bits(points(made / "later", stage))
    weights = [read_manifest(made / name)["files"]["adapter_model.safetensors"] for name in (stage, "later")]
    assert weights[0] == weights[1]


def test_a_series_is_cut_whole_or_not_at_all(tmp_path, monkeypatch):
    """A kill while it is cut must not lose what came before: PPO's rows stand nowhere else."""
    series = tmp_path / "history.jsonl"
    for step in range(3):
        append_row(series, {"step": step})

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(os, "replace", killed)
        truncate_after(series, 1, "step")
    assert len(read_rows(series)) == 3
    truncate_after(series, 1, "step")
    assert read_rows(series) == [{"step": 0}, {"step": 1}]


# --- no network -----------------------------------------------------------------------------------------------------


class Listener:
    """Counts who connects; as the proxy and as W&B's server it would hear every call."""

    def __enter__(self):
        self.socket, self.calls = socket.create_server(("127.0.0.1", 0)), []
        threading.Thread(target=self._hear, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        return self

    def _hear(self):
        while True:
            try:
                caller, _ = self.socket.accept()
            except OSError:
                return
            self.calls.append(caller.recv(200))
            caller.close()

    def __exit__(self, *_):
        self.socket.close()


def test_nothing_reaches_for_the_network_or_an_account(made, tmp_path):
    kernels = Path.home() / ".cache/stackllama"
    if kernels.is_dir():  # compiled by now, which takes 12 s
        shutil.copytree(kernels, tmp_path / ".cache/stackllama")
    with Listener() as listener:
        proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy",
                                 "WANDB_BASE_URL"), listener.address)
        home = {"HOME": str(tmp_path), "NO_PROXY": "", "no_proxy": ""}
        said = finished(subprocess.Popen(
            [sys.executable, "-m", *words_of_stage(made, "sft", "alone")], cwd=ROOT, env=environment() | home | proxies,
            stderr=subprocess.PIPE, text=True))
    assert listener.calls == []
    assert "wandb" not in said.lower()  # nor does it ask for a key, or tell of itself
    assert wandb(made / "logs", "alone") == points(made / "alone", "sft")
    left = [file for file in tmp_path.rglob("*") if file.is_file() and "logs" not in file.parts]
    assert all(file.parent == tmp_path / ".cache/stackllama" for file in left)  # the compiled CPU kernels


# --- strangers' text ------------------------------------------------------------------------------------------------


def test_hostile_text_is_text_in_tensorboard():
    from tensorboard import plugin_util

    page = plugin_util.markdown_to_safe_html(format_markdown({"question": HOSTILE, "answer": HOSTILE, "reward": 0.5}))
    assert set(re.findall(r"<(/?\w+)", page)) <= {"p", "/p", "strong", "/strong", "pre", "/pre", "code", "/code"}
    read = html.unescape(page)
    for part in ("<script>alert(1)</script> ![x](http://a/b) **bold**", "</pre><img src=x onerror=alert(2)>",
                 r"\x1b[31m\x00\u202ered"):
        assert read.count(part) == 2, part


def test_hostile_text_is_text_in_wandb(tmp_path):
    tracker = WandB(RunContext(tmp_path / "logs", "ppo", "0" * 12), "ppo", "", {})
    tracker.start()
    tracker.log_samples(3, [{"question": HOSTILE, "answer": "fine", "reward": 0.5}])
    tracker.close()
    (page,) = (file.read_text() for file in (tmp_path / "logs").rglob("*.html"))
    assert set(re.findall(r"<(/?\w+)", page)) == {"section", "/section", "h4", "/h4", "pre", "/pre"}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_hostile_text_does_nothing_to_a_terminal(capsys):
    terminal = Terminal("ppo", "iteration")
    answered = {"question": HOSTILE, "answer": "\x1b]0;title\x07 \x9b31m", "reward": 0.5}
    terminal.log_samples(3, [answered, {"question": "next"}])
    said = capsys.readouterr().err
    assert said.startswith("ppo: sample at iteration 3: question: <script>") and said.count("\n") == 1
    assert said.rstrip("\n").isprintable() and "reward: 0.5" in said and "next" not in said


# --- the setting ----------------------------------------------------------------------------------------------------


def test_without_the_terminal_the_training_is_silent(capsys, tmp_path):
    for quiet in (False, True):
        logs = TrainingLogger(tmp_path, "sft", quiet=quiet)
        progress = logs.progress("sft", 2, done=0)
        logs.log_metrics(1, {"loss": 2.0})
        logs.log_metrics(1, {"validation_perplexity": 7.5})
        logs.log_samples(1, [{"question": "q", "answer": "a"}])
        progress.finish()
        said = capsys.readouterr().err
        assert bool(said) != quiet
        assert quiet or ("sft: held out at step 1: perplexity 7.5\n" in said and "loss" not in said)


@pytest.mark.parametrize(("log_to", "says"), [
    (["jsonl", "tensorbord"], "ppo: log_to must be one of 'terminal', 'jsonl', 'tensorboard', 'wandb', not 'tensorb"),
    (["terminal"], "ppo: log_to must name jsonl, whose files are part of the artifact"),
    (["jsonl", "jsonl"], "ppo: log_to must name jsonl, .* and nothing twice, not jsonl, jsonl")])
def test_where_it_cannot_go_is_one_line(tmp_path, log_to, says):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"ppo": {"log_to": log_to}}))
    with pytest.raises(SettingsError, match=says):
        load_recipe(tmp_path / "x.yaml")


def test_given_once_it_is_for_all_three(tmp_path):
    (tmp_path / "x.yaml").write_text("log_to: [jsonl, tensorboard]\nppo: {log_to: [jsonl]}\n")
    recipe = load_recipe(tmp_path / "x.yaml")
    assert {name: getattr(recipe, name).log_to for name in COUNTS} == dict.fromkeys(
        COUNTS, ("jsonl", "tensorboard")) | {"ppo": ("jsonl",)}
    assert load_recipe(tmp_path / "x.yaml", {"log_to": ["jsonl", "wandb"]}).ppo.log_to == ("jsonl", "wandb")


def test_a_missing_package_is_refused_in_one_line_before_anything(made, monkeypatch, capsys):
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "wandb" else object())
    with pytest.raises(SettingsError, match=r"^sft: log_to asks for wandb, which is not installed: make extras \(or p"):
        resolve_recipe({"recipe": str(made / "recipe.yaml"), "dump": [str(made)]})
    monkeypatch.setattr(sys, "argv", ["ppo", "--recipe", str(made / "recipe.yaml"), "--policy", "none", "--reward",
                                      "none", "--pairs", "none", "--out", str(made / "refused")])
    with pytest.raises(SystemExit) as ended:
        command.run_command(Path(ppo.__file__))
    said = capsys.readouterr().err
    assert ended.value.code == 1 and said.startswith("ppo: error: ppo: log_to asks for wandb") and said.count("\n") == 1
    assert not list(made.glob("refused*"))
    config = {"recipe": str(made / "recipe.yaml"), "dump": [str(made)], "log_to": ["jsonl", "tensorboard"]}
    assert resolve_recipe(config)


def test_another_place_to_log_to_makes_nothing_stale(made, tmp_path, capsys):
    other = replace(Ppo(), log_to=("jsonl",))
    assert section_settings(replace(Recipe(), ppo=other), "ppo") == section_settings(Recipe(), "ppo")
    assert to_dict(other)["log_to"] == ["jsonl"]  # what the run's recipe.yaml hands to the stages
    config = replace(load_recipe(made / "recipe.yaml").sft, log_to=("jsonl",))
    command.make(sft.run, config, made / "sft", {"base": made / "base", "pairs": made / "pairs"})
    assert "already made" in capsys.readouterr().err
    loud = (made / "recipe.yaml").read_text()
    try:
        (made / "recipe.yaml").write_text(yaml.safe_dump(to_dict(load_recipe(made / "recipe.yaml"))))
        assert lineage.find_stale_reasons(read_record(made / "sft")) == []
    finally:
        (made / "recipe.yaml").write_text(loud)


# --- what docs/metrics.md says --------------------------------------------------------------------------------------


def test_the_table_of_metrics_lists_every_name_and_no_other(made):
    part = (ROOT / "docs/metrics.md").read_text()
    listed: dict[str, set[str]] = {stage: set() for stage in COUNTS}
    for names, stages in re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| ([a-z, ]+) \|", part, re.MULTILINE):
        for stage in stages.split(", "):
            listed[stage] |= set(re.findall(r"`(\w+)`", names))
    for run, stage in RUNS.items():
        logged = {name.partition("/")[2] for name in points(made / run, stage)}
        assert listed[stage] == {name.replace("reward_model", "reward_SOURCE") for name in logged}, run
