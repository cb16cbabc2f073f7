"""Progress: counts, rates that are not rounded to 0, time left, and the time of day in a log."""

import json
import os
import pty
import re
import select
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from stages.runtime import progress, stage_lines
from stages.runtime.progress import Progress
from stages.runtime.stage_lines import Schedule


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_slow_rate_has_its_digits_and_a_log_line_its_time_of_day(clock, capsys):
    shown = Progress("ppo", 45, "iterations", done=5)
    clock[0] = 250.0
    shown.advance(3, note="reward 0.5")
    line = capsys.readouterr().err
    assert re.fullmatch(r"ppo: 8/45 iterations \(18 %\), 0\.012 iterations/s, 4 min 10 s elapsed, 51 min 23 s left, "
                        r"reward 0\.5, at \d\d:\d\d:\d\d\n", line)


def test_a_log_has_a_line_every_so_often_and_one_at_the_end(clock, capsys):
    items = progress.track(range(100), "posts", 100, "rows")
    for _ in items:
        clock[0] += 1.0
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 // 15 + 1 and lines[-1].startswith("posts: 100/100 rows (100 %), 1 rows/s")


def test_work_of_one_long_unit_has_one_line(clock, capsys):
    for _ in progress.track(range(1), "answers", 1, "batches"):
        clock[0] += 100.0
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize(("number", "text"), [
    (0, "0"), (0.012, "0.012"), (0.5, "0.5"), (1, "1"), (3.14159, "3.1"), (512, "512"), (12_345, "12.3k"),
    (3.2e9, "3.2G")])
def test_numbers_are_short(number, text):
    assert progress._format_count(number) == text


@pytest.fixture
def terminal(monkeypatch):
    """A terminal behind the pipe that stderr is; returns what is on it."""
    screen, end = pty.openpty()
    monkeypatch.setenv(stage_lines.TERMINAL, os.ttyname(end))
    schedule = Schedule("3/9", "results/demo/sft", time.time(), None, 0.0, False)
    monkeypatch.setenv(stage_lines.SCHEDULE, json.dumps(asdict(schedule)))

    def read() -> str:
        """Read until nothing more comes: the kernel hands a terminal's text on in pieces."""
        pieces = []
        while select.select([screen], [], [], 0.2)[0]:
            pieces.append(os.read(screen, 100_000))
        return b"".join(pieces).decode()

    yield read
    os.close(screen)
    os.close(end)


def test_a_terminal_gets_a_bar_and_the_log_a_line_now_and_then(clock, terminal, capsys):
    shown = Progress("sft", 100, "steps")
    for _ in range(5):
        clock[0] += 10.0
        shown.advance(10)
    last = terminal().split(progress.CLEAR_LINE)[-1]
    assert last.startswith("[3/9] [==========          ] sft: 50/100 steps (50 %), 1 steps/s, ") and len(last) < 80
    assert capsys.readouterr().err == ""
    shown.finish()
    assert terminal() == progress.CLEAR_LINE, "the line takes the place of the bar"
    assert capsys.readouterr().err.startswith("[3/9] sft: 50/100 steps")


def test_a_line_takes_the_place_of_the_bar(terminal, capsys):
    stage_lines.print_line("sft: loaded")
    assert terminal() == progress.CLEAR_LINE and capsys.readouterr().err == "[3/9] sft: loaded\n"


@pytest.mark.parametrize("path", ["/dev/null", "/nowhere/tty"])
def test_what_is_no_terminal_gets_lines(path, monkeypatch, clock, capsys):
    monkeypatch.setenv(stage_lines.TERMINAL, path)
    shown = Progress("sft", 100, "steps")
    clock[0] = 20.0
    shown.advance()
    assert capsys.readouterr().err.startswith("sft: 1/100 steps (1 %)")


def test_the_time_left_of_the_whole_run_is_shown_where_it_is_known(clock, monkeypatch, capsys):
    """A stage's own bar counts more than earlier runs; one of another work lasts as long as the stage did before."""
    for is_stage, stage_seconds, has_unknown, ends in (
            (True, None, False, ", 1 h 33 min for the whole run"),
            (True, 7200.4, True, ", over 1 h 33 min for the whole run"),
            (False, 7200.4, False, ", (3 h 00 min|2 h 59 min) for the whole run"),
            (False, 60.0, False, ", 1 h 33 min for the whole run"),
            (False, None, False, "")):
        schedule = Schedule("3/9", "results/demo/sft", time.time(), stage_seconds, 3600.0, has_unknown)
        monkeypatch.setenv(stage_lines.SCHEDULE, json.dumps(asdict(schedule)))
        clock[0] = 0.0
        shown = Progress("sft", 100, "steps", is_stage=is_stage)
        clock[0] = 20.0
        shown.advance()
        assert re.search(rf"33 min 00 s left{ends}, at ", capsys.readouterr().err)


def test_the_training_of_the_artifact_is_the_stage_and_that_of_a_part_is_not(monkeypatch):
    schedule = Schedule("3/9", "results/demo/reward", 0.0, None, 0.0, False)
    monkeypatch.setenv(stage_lines.SCHEDULE, json.dumps(asdict(schedule)))
    assert stage_lines.is_stage_folder(Path("results/demo/reward.partial"))
    assert not stage_lines.is_stage_folder(Path("results/demo/reward.partial/member-1"))
    monkeypatch.delenv(stage_lines.SCHEDULE)
    assert not stage_lines.is_stage_folder(Path("results/demo/reward.partial"))


def test_a_log_of_days_has_a_line_an_hour(clock, capsys):
    shown = Progress("ppo", 4 * 24 * 360, "iterations")
    for _ in range(4 * 24 * 360):
        clock[0] += 10.0
        shown.advance()
    hours = [line.split(", ")[2] for line in capsys.readouterr().err.splitlines()]
    assert sum(text.endswith("min elapsed") and int(text.split(" h ")[0]) >= 24 for text in hours) == 3 * 24
    assert len(hours) < 200 and "5 min 00 s elapsed" in hours[:20]
