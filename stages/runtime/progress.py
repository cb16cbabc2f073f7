"""Show progress on stderr: a bar with rate and time left on a terminal, in a log a line now and then.

Lines become rarer as the work goes on, down to one an hour: a log of days has some two hundred.
"""

import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator

from stages.render.terminal import shorten
from stages.render.units import format_duration
from stages.runtime.stage_lines import CLEAR_LINE, add_place, format_run_left, open_terminal, print_line

LOG_EVERY_SECONDS = 15.0  # at first
LOG_EVERY_SHARE = 1 / 12  # of the time that has passed, once that is more
LOG_EVERY_SECONDS_AT_MOST = 3600.0
LOG_BESIDE_BAR_EVERY_SECONDS = 600.0  # the terminal shows these lines, too
BAR_EVERY_SECONDS = 0.2
BAR_CELLS = 20


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
        self.start = self.last_bar = self.last_line = time.monotonic()
        self.terminal = None if quiet else open_terminal()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Count `amount` more units; `note` is a short text shown at the end (a loss, a reward)."""
        self.done += amount
        now = time.monotonic()
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

    def _format(self, note: str) -> str:
        elapsed = max(time.monotonic() - self.start, 1e-9)
        rate = (self.done - self.initial) / elapsed
        left = (self.total - self.done) / rate if self.total and rate > 0 else 0.0  # 0: unknown, or done
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


def _format_count(number: float) -> str:
    for limit, scale, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= limit:
            return f"{number / scale:.1f}{letter}"
    if 0 < abs(number) < 1:
        return f"{number:.2g}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
