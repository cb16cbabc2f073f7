"""Progress: counts, rates that are not rounded to 0, time left, and the time of day in a log."""

import re

import pytest

from stages.runtime import progress
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
