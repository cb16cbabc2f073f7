"""Follow a stage from elsewhere: its progress, what has become of its process, and when to end."""

import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages import inspect
from stages.inspection import watch as watching
from stages.inspection.watch import format_line, format_page, observe, watch
from stages.recipe.sections.models import Merge
from stages.runtime import progress
from stages.runtime.progress import Progress
from stages.runtime.stopping import Stopped

MANIFEST = {"stage": "sft", "seconds": 75, "metrics": {"perplexity": 12.5}, "files": {}}


@pytest.fixture
def out(tmp_path):
    """A stage that has just begun: the path of its artifact."""
    (tmp_path / "sft.partial").mkdir()
    return tmp_path / "sft"


def publish(out: Path) -> None:
    out.with_name("sft.partial").rename(out)
    (out / "manifest.json").write_text(json.dumps(MANIFEST))


def report_steps(monkeypatch, steps: int = 40, seconds: float = 3.0) -> None:
    now = [time.monotonic()]
    with monkeypatch.context() as patch:
        patch.setattr(progress.time, "monotonic", lambda: now[0])
        shown = Progress("sft", 100, "steps", quiet=True)
        for _ in range(steps):
            now[0] += seconds
            shown.advance(note="loss 3.1")


def test_the_page_shows_progress_checkpoint_and_metrics(out, monkeypatch):
    partial = out.with_name("sft.partial")
    (partial / "checkpoints" / "checkpoint-40").mkdir(parents=True)
    (partial / "checkpoints" / "checkpoint-40" / "complete.json").touch()
    (partial / "history.jsonl").write_text("".join(json.dumps({"step": n, "loss": n / 8}) + "\n" for n in range(9))
                                           + '{"step": 9, "lo')
    with progress.follow(out):
        first = observe(out, time.time())
        assert first["state"] == "running" and format_line(first).endswith(", no progress to show yet")
        report_steps(monkeypatch)
        page = format_page(observe(partial, time.time() + 61))
        line = format_line(observe(out, time.time()))
    assert re.match(rf"{out}: running for 1 min 0\d s, process \d+ on .*, last progress 1 min 0\d s ago", page[0])
    assert page[1] == "  sft: 40/100 steps (40 %), 0.33 steps/s, 2 min 00 s elapsed, 3 min 00 s left, loss 3.1"
    assert page[2].startswith("  last checkpoint: checkpoint-40, 1 min ")
    assert page[3:] == ["  step 6: loss 0.75", "  step 7: loss 0.875", "  step 8: loss 1"]
    assert line.startswith(f"{out}: sft: 40/100 steps (40 %), 0.33 steps/s") and line.endswith(" s ago")


def test_without_progress_for_longer_than_ever_it_is_stale(out, monkeypatch):
    with progress.follow(out):
        report_steps(monkeypatch, seconds=200.0)
        assert observe(out, time.time() + 590)["state"] == "running", "three times the longest wait before"
        facts = observe(out, time.time() + 610)
        assert facts["state"] == "stale" and re.search(
            r"no progress for 10 min 1\d s, the longest wait before was 3 min 20 s; process \d+ on .*: it still runs$",
            format_line(facts))
        written = json.loads(progress.progress_path(out).read_text())
        progress.progress_path(out).write_text(json.dumps(written | {"host": "elsewhere"}))
        facts = observe(out, time.time() + 610)
        assert facts["state"] == "stale" and "on elsewhere: whether it still runs cannot be seen" in format_line(facts)
        assert observe(out, time.time())["state"] == "running"


def test_a_process_that_was_killed_is_gone(out):
    killed = ("import os, signal, sys; from pathlib import Path; from stages.runtime import progress\n"
              "with progress.follow(Path(sys.argv[1])): os.kill(os.getpid(), signal.SIGKILL)")
    subprocess.run([sys.executable, "-c", killed, str(out)], cwd=Path(__file__).parents[2])
    stream = io.StringIO()
    assert watch(out, stream=stream, sleep=lambda _: pytest.fail("it waits")) == 1
    assert re.fullmatch(rf"{out}: not finished, process \d+ on .* is gone; its last sign of life was .* ago: the same "
                        r"command continues\n", stream.getvalue())
    assert observe(out, time.time())["state"] == "ended"


def test_another_process_of_the_same_id_is_another_one(out):
    with progress.follow(out):
        facts = progress.read_progress(out)
        assert progress.is_running(facts) and not progress.is_running(facts | {"process_start": 1.0})
    own, parent = (progress._process_start(pid) for pid in (os.getpid(), os.getppid()))
    assert own >= parent > 0, "when they began tells processes apart"


@pytest.mark.parametrize(("error", "says"), [
    (Stopped(15, "step 12"), "stopped by SIGTERM at step 12, with a checkpoint: the same command continues"),
    (ValueError("the disk\nis \x1b[2J full"), r"failed: the disk is \x1b[2J full"),
    (MemoryError(), "failed: MemoryError")])
def test_the_cause_of_an_end_is_said(out, error, says):
    with pytest.raises(type(error)), progress.follow(out):
        raise error
    stream = io.StringIO()
    assert watch(out, stream=stream) == 1
    line = stream.getvalue()
    assert line.startswith(f"{out}: not finished, process ") and line.endswith(f"ago: {says}\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_in_a_log_there_is_a_line_each_time_until_the_stage_is_finished(out, monkeypatch, as_json):
    following, waits, stream = progress.follow(out), [], io.StringIO()
    following.__enter__()
    report_steps(monkeypatch)

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            publish(out)
            following.__exit__(None, None, None)

    assert watch(out, as_json=as_json, stream=stream, sleep=wait) == 0 and waits == [60.0, 60.0]
    lines = stream.getvalue().splitlines()
    if as_json:
        assert [json.loads(line)["state"] for line in lines] == ["running", "running", "finished"]
    else:
        assert [" 40/100 steps " in line for line in lines] == [True, True, False]
        assert lines[-1] == f"{out}: finished, made in 1 min 15 s, perplexity 12.5"


def test_on_a_terminal_the_lines_are_drawn_in_place(out, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    following, stream = progress.follow(out), Terminal()
    following.__enter__()
    report_steps(monkeypatch)

    def wait(seconds: float) -> None:
        assert seconds == 2.0
        publish(out)
        following.__exit__(None, None, None)

    assert watch(out, stream=stream, sleep=wait) == 0
    first, last = re.split(r"\x1b\[(?:\d+)F\x1b\[J", stream.getvalue())
    count = first.count("\n")
    assert watching.UP_AND_CLEAR.format(count) in stream.getvalue() and max(map(len, first.split("\n"))) < 80
    assert "loss 3.1" in first and "finished, made in" in " ".join(last.split())


def test_a_stage_leaves_no_file_behind_and_one_that_failed_does(tmp_path, monkeypatch):
    from stages.command_line import command

    states = []

    def run(config, out):
        report_steps(monkeypatch)
        states.append(observe(tmp_path / "out", time.time())["state"])
        if len(states) == 1:
            raise ValueError("a mistake")
        return {}

    with pytest.raises(ValueError, match="a mistake"):
        command.make(run, Merge(), tmp_path / "out", {})
    assert observe(tmp_path / "out", time.time())["ended"] == "failed: a mistake"
    command.make(run, Merge(), tmp_path / "out", {})
    assert states == ["running", "running"] and observe(tmp_path / "out", time.time())["state"] == "finished"
    assert not list(tmp_path.glob(".*.json")) and not list((tmp_path / "out").glob("*progress*"))


def test_a_mistake_is_one_line(out, capsys):
    (out.parent / "empty").mkdir()
    for path, says in ((out, "is not finished, and no process makes it: its command continues it"),
                       (out.parent / "nowhere", "there is no "),
                       (out.parent / "empty", "of which there is none in it")):
        assert inspect.main(["--watch", str(path)]) == 1
        error = capsys.readouterr().err
        assert error.startswith("inspect: error: ") and says in error and error.count("\n") == 1
    with progress.follow(out):
        assert inspect.main(["--watch", str(out.parent)]) == 1
    assert f"name one that is being made, as {out}" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x", "at": 1, "started": 1}'])
def test_a_damaged_file_raises_nothing(out, content):
    progress.progress_path(out).write_text(content)
    assert progress.read_progress(out) is None
