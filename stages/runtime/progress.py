"""A bar with rate and time left on a terminal; one line every so often in a log."""

import sys
import time
from collections.abc import Iterable, Iterator

LOG_EVERY_SECONDS = 15.0
BAR_EVERY_SECONDS = 0.2
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Counts units of work towards a total (None: unknown) and says how it goes on stderr, unless it is `quiet`."""

    def __init__(self, label: str, total: float | None, unit: str, done: float = 0, quiet: bool = False):
        self.label, self.total, self.unit, self.quiet = label, total, unit, quiet
        self.done = self.first = done
        self.start = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()

    def advance(self, amount: float = 1, note: str = "") -> None:
        """Count `amount` more units; `note` is a short text shown behind (a loss, a reward)."""
        self.done += amount
        now = time.monotonic()
        if now - self.shown >= (BAR_EVERY_SECONDS if self.terminal else LOG_EVERY_SECONDS):
            self.shown = now
            self._write(note, end="" if self.terminal else "\n")

    def finish(self, note: str = "") -> None:
        self._write(note, end="\n")

    def _write(self, note: str, end: str) -> None:
        if self.quiet:
            return
        elapsed = max(time.monotonic() - self.start, 1e-9)
        rate = (self.done - self.first) / elapsed
        parts = [f"{self.label}: {_short(self.done)}"]
        if self.total:
            parts[0] += f"/{_short(self.total)} {self.unit} ({100 * self.done / self.total:.0f} %)"
        else:
            parts[0] += f" {self.unit}"
        parts.append(f"{_short(rate)} {self.unit}/s")
        left = (self.total - self.done) / rate if self.total and rate > 0 else 0
        parts.append(f"{_clock(elapsed)} gone" + (f", {_clock(left)} left" if left > 0 else ""))
        line = ", ".join(parts + [note] * bool(note))
        if self.terminal:
            line = CLEAR_LINE + line
        print(line, end=end, file=sys.stderr, flush=True)


def track(items: Iterable, label: str, total: float | None, unit: str, quiet: bool = False) -> Iterator:
    """Yield the items and count them."""
    progress = Progress(label, total, unit, quiet=quiet)
    for item in items:
        yield item
        progress.advance()
    progress.finish()


def _short(number: float) -> str:
    for limit, scale, letter in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= limit:
            return f"{number / scale:.1f}{letter}"
    return f"{number:.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
