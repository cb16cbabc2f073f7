"""Run a tool that writes one file or folder, and makes no artifact: its failures are one line."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

from stages.command_line.failures import describe_failure
from stages.render.terminal import escape_controls
from stages.runtime import stopping


def run_tool(name: str, out: Path, work: Callable[[], None]) -> int:
    """Do the work that writes `out`; return the exit code, with one line on stderr for what the user can mend."""
    try:
        work()
    except stopping.Stopped as stop:
        print(f"{name}: stopped by {stop.signal.name}: nothing is left half-written", file=sys.stderr)
        return stop.exit_code
    except Exception as error:
        if (message := describe_failure(error, out)) is None:
            raise
        print(f"{name}: error: {escape_controls(' '.join(message.split()))}", file=sys.stderr)
        return 1
    return 0


def print_text(text: str) -> None:
    """Print a text; drop the rest if the reader has closed the pipe, as `| head` does."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        close_output()


def close_output() -> None:
    """Drop what is still to be printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
