"""Handle signals to Snakemake: pass SIGTERM and SIGHUP on to the stages that it runs, and say Ctrl-C in one line.

Alone, it would wait for the stages after SIGTERM, maybe for days, and end without them after SIGHUP.
"""

import os
import signal
import sys
import threading
from contextlib import suppress
from types import TracebackType


def report_interrupts() -> None:
    """Print one line and no traceback for a Ctrl-C that nothing handles, as while Snakemake reads the workflow."""
    sys.excepthook = _print_interrupt


def _print_interrupt(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("snakemake: stopped by SIGINT: the same command continues", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, traceback)


def forward_to_stages() -> None:
    """Let SIGTERM, and SIGHUP unless it is ignored, end the stages beside what Snakemake does with SIGTERM.

    Ctrl-C interrupts Snakemake once. Call it after Snakemake has set its handler.
    """
    wait_for_jobs = signal.getsignal(signal.SIGTERM)

    def handle(number, frame) -> None:
        if callable(wait_for_jobs):
            # In a thread: it takes a lock that the interrupted code may have.
            threading.Thread(target=wait_for_jobs, args=(number, frame)).start()
        for pid in list_stages():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def interrupt(number, frame) -> None:
        # Once: in the midst of what Snakemake does then, another exception is a stack of them. The stages have the
        # terminal's Ctrl-C, too, and the second one ends them.
        signal.signal(signal.SIGINT, lambda number, frame: None)
        raise KeyboardInterrupt

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, handle)


def list_stages() -> list[int]:
    """List the processes that the shells of this process run.

    The shells themselves wait for them, and what a stage has started is the stage's to end.
    """
    import psutil  # of Snakemake's requirements; a dry run does without it

    stages = []
    for shell in psutil.Process().children():
        with suppress(psutil.Error):
            stages += [child.pid for child in shell.children()]
    return stages
