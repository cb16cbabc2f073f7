"""Stop a program on SIGINT (Ctrl-C), SIGTERM or SIGHUP (its terminal was closed).

It stops at once, or in a training loop once it has saved a checkpoint. The exit code is 128 + the signal's number (130,
143, 129), as a shell reports a program that the signal ended: a scheduler takes it for a job that was stopped, not for
one that failed. A second signal ends the process at once.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A scheduler or a terminal may signal the whole process group beside Snakemake, which passes these on: one request.
REPEATED_SECONDS = 2.0
_request: "StopRequest | None" = None


class Stopped(KeyboardInterrupt):
    """Raised where a program stops.

    checkpoint: the place in training that was saved, as "step 12"; empty if nothing was saved just now.
    """

    def __init__(self, signal_number: int, checkpoint: str = ""):
        super().__init__()
        self.signal, self.checkpoint = signal.Signals(signal_number), checkpoint

    @property
    def exit_code(self) -> int:
        return 128 + self.signal

    def describe(self) -> str:
        """Say in one line what was stopped, and how to go on."""
        if self.checkpoint:
            return f"stopped by {self.signal.name} at {self.checkpoint}, with a checkpoint: the same command continues"
        return f"stopped by {self.signal.name}: the same command continues"


class StopRequest:
    """Whether a signal has asked the block of `deferred` to stop; `signal` is None until then."""

    signal: int | None = None


def install() -> None:
    """Handle the signals in this process; those that it ignores, as under nohup, stay ignored."""
    first_seconds: list[float] = []

    def handle(number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not first_seconds:
            first_seconds.append(now)
            _stop(number)
        elif number == signal.SIGINT or now - first_seconds[0] > REPEATED_SECONDS:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handle)


def ignore() -> None:
    """Ignore the signals from here on, in a program that is done: they would end it in the midst of its exit handlers.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def _stop(number: int) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a handler would wait for the end of a long call into C++
    if _request is None:
        raise Stopped(number)
    _request.signal = number
    name = signal.Signals(number).name
    # Not print: the signal may have interrupted one, and a stream cannot be entered twice.
    with suppress(OSError):  # the terminal is gone
        os.write(2, f"\n{name}: saving a checkpoint, then stopping; Ctrl-C now stops at once\n".encode())


@contextmanager
def deferred() -> Iterator[StopRequest]:
    """Within the block a signal only sets the yielded request, for the block to raise Stopped where it can resume.

    A block that ends first has done its work, and the program goes on to its result.
    """
    global _request
    _request = StopRequest()
    try:
        yield _request
    finally:
        _request = None
