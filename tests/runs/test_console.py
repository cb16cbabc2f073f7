"""What a person sees of a run: the stages' lines, not Snakemake's, and the cause of a failure as the last line."""

import enum
import json
import logging
import os
from pathlib import Path

import pytest

from stages.recipe.recipe import Recipe, section_settings
from stages.runs import console
from stages.runs.console import Console, announce_run, estimate_seconds, quieten_snakemake
from stages.runtime import stage_lines

Event = enum.Enum("Event", "JOB_INFO JOB_ERROR JOB_FINISHED RUN_INFO PROGRESS ERROR")  # as Snakemake's LogEvent


def record(message: str, level: int = logging.INFO, function: str = "somewhere", **facts) -> logging.LogRecord:
    made = logging.LogRecord("snakemake.logging", level, __file__, 1, message, (), None, func=function)
    vars(made).update(facts)
    return made


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "sft.log"
    path.write_text("[1/1] sft: error: of an earlier attempt\n")
    return path


def fail(log, text: str) -> tuple[Console, list[str]]:
    """Run a job that writes `text` into its log and fails."""
    shown = Console()
    assert not shown.filter(record("", event=Event.JOB_INFO, log=[str(log)]))
    with open(log, "a") as stream:
        stream.write(text)
    assert not shown.filter(record("Error in rule sft", logging.ERROR, event=Event.JOB_ERROR, rule_name="sft",
                                   log=[str(log)]))
    return shown, shown.describe_failures()


@pytest.mark.parametrize("chatter", [
    record("Job stats:", event=Event.RUN_INFO), record("rule x:", event=Event.JOB_INFO, log=[]),
    record("1 of 2 steps", event=Event.PROGRESS), record("Finished", event=Event.JOB_FINISHED),
    record("Building DAG of jobs...", function="_build_dag"), record("Using shell: bash", function="execute"),
    record("Elapsed time: 1", function="log_workflow_runtime")])
def test_snakemakes_progress_is_left_out_where_the_stages_show_theirs(chatter):
    shown = Console()
    assert not shown.filter(chatter)
    shown.shows_jobs = True
    assert shown.filter(chatter)


@pytest.mark.parametrize("shown_record", [
    record("Nothing to be done (all requested files are present)", function="execute"),
    record("MissingRuleException:\nNo rule to produce x", logging.ERROR, event=Event.ERROR),
    record("WorkflowError:\nAt least one job did not complete successfully.", logging.ERROR),
    record("Congratulations", function="lint"), record("careful", logging.WARNING, function="execute")])
def test_results_warnings_and_errors_stay(shown_record):
    assert Console().filter(shown_record)


def test_the_cause_of_a_failure_is_the_last_line(log):
    shown, lines = fail(log, "[3/9] sft: started\n[3/9] sft: error: there is no \x1b[2J base\n[3/9] details: x.txt\n")
    assert lines == [f"snakemake: error: sft failed: there is no \\x1b[2J base (log: {log})"]
    for text in ("Exiting because a job execution failed. Look above",
                 "WorkflowError:\nAt least one job did not complete"):
        assert not shown.filter(record(text, logging.ERROR))
    assert not shown.filter(record('RuleException:\nCalledProcessError in file "x"', logging.ERROR, event=Event.ERROR))


def test_what_torchrun_prints_after_a_stop_is_not_the_cause(log):
    text = ("[3/9] sft: stopped by SIGTERM at step 12, with a checkpoint: the same command continues\n"
            "Traceback (most recent call last):\n  File x\ntorch.SignalException: Process 7 got signal: 15\n"
            "srun: error: node1: task 0: Exited with exit code 1\n")
    assert "sft failed: stopped by SIGTERM at step 12, with a checkpoint: the same" in fail(log, text)[1][0]


def test_the_cause_on_several_nodes_is_the_stages_and_not_that_srun_saw_it_end(log):
    _, lines = fail(log, "[3/9] sft: error: no GPU\nsrun: error: node2: task 1: Exited with exit code 1\n")
    assert lines == [f"snakemake: error: sft failed: no GPU (log: {log})"]


@pytest.mark.parametrize(("text", "says"), [
    ("[3/9] sft: 3/9 steps\n", "it ended without an error message, as if killed; its last line was: [3/9] sft: 3/9"),
    ("Traceback (most recent call last):\n  File x\nKeyError: 'a'\n\n", "KeyError: 'a': a mistake in this program"),
    ("Traceback (most recent call last):\n  File x\nKeyboardInterrupt\n",
     "stopped by SIGINT: the same command continues"),
    ("", "it wrote nothing to its log")])
def test_a_failure_without_an_error_line(log, text, says):
    """The error of the attempt before this one is none of this one's."""
    assert f"sft failed: {says}" in fail(log, text)[1][0]


def test_only_the_handler_that_prints_is_quiet():
    printing, writing = logging.NullHandler(), logging.NullHandler()
    printing.name = console.HANDLER
    logger = logging.getLogger(console.LOGGER)
    before, logger.handlers = logger.handlers, [printing, writing]
    try:
        shown = quieten_snakemake()
    finally:
        logger.handlers = before
    assert printing.filters == [shown] and writing.filters == []


def make_artifact(folder, stage: str, seconds: float, config: dict) -> None:
    folder.mkdir(parents=True)
    (folder / ".manifest.json").write_text(json.dumps({"stage": stage, "seconds": seconds, "config": config}))


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (stage_lines.PLAN, stage_lines.TERMINAL, stage_lines.SCHEDULE):
        monkeypatch.setenv(name, "")  # so that it is removed again after the test
        monkeypatch.delenv(name)
    recipe = Recipe(name="new", dump=("a.7z",))
    for run, dump in (("old", "a.7z"), ("other", "b.7z")):
        for stage, section, seconds in (("sft", "sft", 60), ("reward-merged", "merge", 30)):
            make_artifact(tmp_path / "results" / run / stage, section, seconds + 100 * (run == "other"),
                          section_settings(recipe, section) | ({"seed": 7} if section == "sft" else {}))
        (tmp_path / "results" / run / "recipe.yaml").write_text(f"dump: [{dump}]\n")
    return recipe


def test_earlier_times_count_with_the_same_settings_and_dump_only(results, tmp_path):
    make_artifact(tmp_path / "results/old/.old/sft-111111111111", "sft", 50, section_settings(results, "sft"))
    make_artifact(tmp_path / "results/old/ppo", "ppo", 10, section_settings(results, "ppo") | {"epochs": 99})
    make_artifact(tmp_path / "results/old/.old/sft-merged-111111111111", "sft", 500, section_settings(results, "sft"))
    folders = [tmp_path / "results/new" / name for name in ("sft", "reward-merged", "ppo", "report")]
    assert list(estimate_seconds(results, folders).values()) == [60, 30, None, None]
    make_artifact(tmp_path / "results/old/pairs", "pairs", 20, section_settings(results, "pairs"))
    scattered = [tmp_path / "results/new" / name for name in ("pairs-shares", "pairs")]
    assert list(estimate_seconds(results, scattered).values()) == [None, None], "gathering takes another time"
    assert list(estimate_seconds(results, scattered[1:]).values()) == [20]


def test_a_run_says_what_it_makes_and_each_stage_its_place_and_the_time_left(results, tmp_path, capsys):
    outputs = [f"results/new/{name}/manifest.json" for name in ("sft", "reward-merged")]
    announce_run(results, "results/new", outputs, is_local=True)
    assert capsys.readouterr().err == (
        "results/new: 2 stages to run: sft, reward-merged; it took about 1 min 30 s before\n")
    stage_lines.begin_stage(Path("results/new/reward-merged"))
    line = capsys.readouterr().err
    assert line.startswith("[2/2] reward-merged: started at ") and line.endswith("30.0 s left for the whole run\n")
    assert os.environ[stage_lines.TERMINAL] == ""


def test_shares_are_one_stage_and_unknown_times_are_not_invented(results, tmp_path, capsys):
    outputs = [f"results/new/{name}/manifest.json" for name in ("pairs-shares/1-of-2", "pairs-shares/2-of-2", "pairs")]
    announce_run(results, "results/new", [*outputs, "results/new/report/report.html"], is_local=False)
    assert capsys.readouterr().err == (
        "results/new: 2 stages to run: pairs-shares, pairs; no estimate of the time\n")
    stage_lines.begin_stage(Path("results/new/pairs-shares/2-of-2"))
    line = capsys.readouterr().err
    assert line.startswith("[1/2] pairs-shares/2-of-2: started at ") and line.endswith(
        ", no estimate for the whole run\n")


def test_a_stage_without_an_earlier_time_is_named_and_the_others_are_counted(results, capsys):
    outputs = [f"results/new/{name}/manifest.json" for name in ("sft", "reward-merged", "ppo")]
    announce_run(results, "results/new", outputs, is_local=True)
    assert capsys.readouterr().err.endswith(
        "; it took about 1 min 30 s before without ppo, for which there is no estimate\n")
    stage_lines.begin_stage(Path("results/new/sft"))
    assert capsys.readouterr().err.endswith(", over 1 min 30 s left for the whole run\n")
