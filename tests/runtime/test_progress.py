"""Progress: counts, rates that are not rounded to 0, time left, and the time of day in a log."""

import os
import pty
import re
import time

import pytest

from stages.runtime import progress, stage_lines
from stages.runtime.progress import Progress


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
    monkeypatch.setenv(stage_lines.PLACE, "3/9")
    yield lambda: os.read(screen, 100_000).decode()
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
    monkeypatch.setenv(stage_lines.RUN_ENDS, str(time.time() + 3600.4))
    shown = Progress("sft", 100, "steps")
    clock[0] = 20.0
    shown.advance()
    assert re.search(r"33 min 00 s left, (1 h 00 min|59 min 5\d s) for the whole run", capsys.readouterr().err)
