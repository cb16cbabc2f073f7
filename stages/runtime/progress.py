"""Show progress on stderr: a bar with rate and time left on a terminal, in a log a line now and then.

Lines become rarer as the work goes on, down to one an hour: a log of days has some two hundred.

For those who follow a stage from elsewhere (`stages.inspect --watch`), the same facts are in `.NAME.progress.json`
beside the artifact while the stage is at work. If it ends without a result, the file stays, with the cause if there was
time to write it.
"""

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.render.terminal import shorten
from stages.render.units import format_duration
from stages.runtime.files import read_json_object, write_json
from stages.runtime.stage_lines import CLEAR_LINE, add_place, format_run_left, open_terminal, print_line
from stages.runtime.stopping import Stopped

LOG_EVERY_SECONDS = 15.0  # at first
LOG_EVERY_SHARE = 1 / 12  # of the time that has passed, once that is more
LOG_EVERY_SECONDS_AT_MOST = 3600.0
LOG_BESIDE_BAR_EVERY_SECONDS = 600.0  # the terminal shows these lines, too
BAR_EVERY_SECONDS = 0.2
BAR_CELLS = 20
ENDING = ".progress.json"
FILE_EVERY_SECONDS = 2.0
TEXT_CHARACTERS = 500
SAME_START_SECONDS = 5.0  # by which the system's account of a process's start may move with the clock
_followed: list[tuple[Path, dict]] = []  # file and facts, in this process; others that it starts do not write to it


class Progress:
    """Count units of work towards a total (None: unknown), and print the count, rate and time left.

    Args:
        done: units that an earlier run has completed; the rate leaves them out.
        quiet: print nothing.
        is_stage: the work is most of what its stage does, so that its time left is the stage's.
    """

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0, quiet: bool = False,
                 is_stage: bool = False):
        self.label, self.total, self.unit, self.quiet, self.is_stage = label, total, unit, quiet, is_stage
        self.done = self.initial = done
        self.start = self.last_bar = self.last_line = self.last_file = self.last_advance = time.monotonic()
        self.longest_wait_seconds = 0.0
        self.terminal = None if quiet else open_terminal()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Count `amount` more units; `note` is a short text shown at the end (a loss, a reward)."""
        self.done += amount
        now = time.monotonic()
        self.longest_wait_seconds = max(self.longest_wait_seconds, now - self.last_advance)
        self.last_advance = now
        if _followed and now - self.last_file >= FILE_EVERY_SECONDS:
            self.last_file = now
            _write_facts(self._describe(note))
        if self.terminal and now - self.last_bar >= BAR_EVERY_SECONDS:
            self.last_bar = now
            self._draw_bar(note)
        is_log = self.terminal is not sys.stderr and self.done != self.total  # `finish` prints the last line
        least = LOG_BESIDE_BAR_EVERY_SECONDS if self.terminal else LOG_EVERY_SECONDS
        every = max(least, (now - self.start) * LOG_EVERY_SHARE)
        if is_log and now - self.last_line >= min(every, LOG_EVERY_SECONDS_AT_MOST):
            self.last_line = now
            self._print_line(note)

    def finish(self, note: str = "") -> None:
        """Print the final count."""
        self._print_line(note)
        if self.terminal and self.terminal is not sys.stderr:
            self.terminal.close()
        self.terminal = None

    def _draw_bar(self, note: str) -> None:
        bar = ""
        if self.total:
            cells = min(int(BAR_CELLS * self.done / self.total), BAR_CELLS)
            bar = f"[{'=' * cells}{' ' * (BAR_CELLS - cells)}] "
        try:
            columns = os.get_terminal_size(self.terminal.fileno()).columns or shutil.get_terminal_size().columns
            self.terminal.write(CLEAR_LINE + shorten(add_place(bar + self._format(note)), columns - 1))
            self.terminal.flush()
        except (OSError, ValueError):  # the terminal was closed
            self.terminal = None

    def _print_line(self, note: str) -> None:
        if not self.quiet:
            print_line(f"{self._format(note)}, at {time.strftime('%H:%M:%S')}")

    def _measure(self) -> tuple[float, float, float]:
        """Return the seconds since the start, the units a second, and the seconds left (0: unknown, or done)."""
        elapsed = max(time.monotonic() - self.start, 1e-9)
        rate = (self.done - self.initial) / elapsed
        return elapsed, rate, (self.total - self.done) / rate if self.total and rate > 0 else 0.0

    def _describe(self, note: str) -> dict:
        """Return where the work is, for those who follow it from elsewhere."""
        elapsed, _, left = self._measure()
        return {"line": self._format(note), "bar_seconds": elapsed, "seconds_left": left, "done": self.done,
                "total": self.total, "unit": self.unit, "longest_wait_seconds": self.longest_wait_seconds}

    def _format(self, note: str) -> str:
        elapsed, rate, left = self._measure()
        parts = [f"{self.label}: {_format_count(self.done)}"]
        if self.total:
            parts[0] += f"/{_format_count(self.total)} {self.unit} ({100 * self.done / self.total:.0f} %)"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{_format_count(rate)} {self.unit}/s")
        parts.append(f"{format_duration(elapsed)} elapsed" + (
            f", {format_duration(left)} left{format_run_left(left, self.is_stage)}" if left > 0 else ""))
        return ", ".join(parts + [note] * bool(note))


def track(items: Iterable, label: str, total: float | None, unit: str) -> Iterator:
    """Yield the items and show how many have been taken."""
    progress = Progress(label, total, unit)
    for item in items:
        yield item
        progress.advance()
    progress.finish()


def progress_path(out: Path) -> Path:
    """Return the path of the file of the artifact `out`."""
    return out.with_name(f".{out.name}{ENDING}")


@contextmanager
def follow(out: Path) -> Iterator[None]:
    """Write the file while the block makes `out`; delete it at the end, or write why the block ended without one."""
    own = {"pid": os.getpid(), "process_start": _process_start(os.getpid()), "host": socket.gethostname()}
    _followed.append((progress_path(out), own | {"started": time.time()}))
    _write_facts({})
    try:
        yield
        progress_path(out).unlink(missing_ok=True)
    except BaseException as error:
        text = error.describe() if isinstance(error, Stopped) else f"failed: {str(error) or type(error).__name__}"
        _write_facts({"ended": " ".join(text.split())[:TEXT_CHARACTERS]})
        raise
    finally:
        _followed.pop()


def read_progress(out: Path) -> dict | None:
    """Read the file of an artifact; None if there is none that can be read."""
    facts = read_json_object(progress_path(out)) or {}
    numbers = (facts.get(name) for name in ("started", "at", "pid", "process_start"))
    return facts if all(isinstance(number, int | float) for number in numbers) else None


def is_running(facts: dict) -> bool | None:
    """Check whether the process that wrote these facts still runs; None: on another machine, which cannot be seen."""
    if facts.get("host") != socket.gethostname():
        return None
    start = _process_start(facts["pid"])
    return start is not None and abs(start - facts["process_start"]) < SAME_START_SECONDS


def _write_facts(facts: dict) -> None:
    """Write the file of this process's artifact anew, with these facts added and the time."""
    path, known = _followed[-1]
    known |= facts | {"at": time.time()}
    with suppress(OSError):  # a full disk is for the stage to say
        write_json(path, known)


def _process_start(pid: int) -> float | None:
    """Return when a process began, in seconds since the epoch: it tells it from a later one of the same id.

    None if there is no such process.
    """
    import psutil  # not where only a bar is shown

    with suppress(psutil.Error):
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    return None


def _format_count(number: float) -> str:
    for limit, scale, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= limit:
            return f"{number / scale:.1f}{letter}"
    if 0 < abs(number) < 1:
        return f"{number:.2g}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
