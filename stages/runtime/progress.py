"""Show progress on stderr: a bar with rate and time left on a terminal, one line every few seconds in a log."""

import sys
import time
from collections.abc import Iterable, Iterator

from stages.render.units import format_duration

LOG_EVERY_SECONDS = 15.0
BAR_EVERY_SECONDS = 0.2
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Count units of work towards a total (None: unknown), and print the count, rate and time left.

    Args:
        done: units that an earlier run has completed; the rate leaves them out.
        quiet: print nothing.
    """

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0, quiet: bool = False):
        self.label, self.total, self.unit, self.quiet = label, total, unit, quiet
        self.done = self.initial = done
        self.start = self.last_print = time.monotonic()
        self.is_terminal = sys.stderr.isatty()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Count `amount` more units; `note` is a short text shown at the end (a loss, a reward)."""
        self.done += amount
        now = time.monotonic()
        if now - self.last_print >= (BAR_EVERY_SECONDS if self.is_terminal else LOG_EVERY_SECONDS):
            self.last_print = now
            self._print(note, end="" if self.is_terminal else "\n")

    def finish(self, note: str = "") -> None:
        """Print the final count."""
        self._print(note, end="\n")

    def _print(self, note: str, end: str) -> None:
        if self.quiet:
            return
        elapsed = max(time.monotonic() - self.start, 1e-9)
        rate = (self.done - self.initial) / elapsed
        parts = [f"{self.label}: {_format_count(self.done)}"]
        if self.total:
            parts[0] += f"/{_format_count(self.total)} {self.unit} ({100 * self.done / self.total:.0f} %)"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{_format_count(rate)} {self.unit}/s")
        left = (self.total - self.done) / rate if self.total and rate > 0 else 0
        parts.append(f"{format_duration(elapsed)} elapsed" + (f", {format_duration(left)} left" if left > 0 else ""))
        line = ", ".join(parts + [note] * bool(note))
        line = CLEAR_LINE + line if self.is_terminal else f"{line}, at {time.strftime('%H:%M:%S')}"
        print(line, end=end, file=sys.stderr, flush=True)


def track(items: Iterable, label: str, total: float | None, unit: str, quiet: bool = False) -> Iterator:
    """Yield the items and show how many have been taken."""
    progress = Progress(label, total, unit, quiet=quiet)
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
