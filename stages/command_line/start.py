"""Begin the program of a stage: handle signals first of all, then load what parses and runs its command.

A tool writes one file or folder, and makes no artifact; its failures are one line, too.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

from stages.runtime import stopping

COMMAND = "stages.command_line.command"  # imported by name: that takes longer than the start of Python


def main(file: str) -> None:
    """Run the command of the program `file` and exit: with 1 and one line for a user's mistake.

    Stopped by Ctrl-C, SIGTERM or SIGHUP: with 130, 143 or 129, and one line.
    """
    stopping.install()
    try:
        importlib.import_module(COMMAND).run_command(Path(file))
        stopping.ignore()
    except stopping.Stopped as stop:
        from stages.runtime.stage_lines import print_line

        print_line(f"{Path(file).stem}: {stop.describe()}")
        sys.exit(stop.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise  # a defect of ours
        sys.exit(f"{Path(file).stem}: error: {sys.executable} has no package {error.name!r}: activate the environment "
                 f"that has the pipeline's packages (source .venv/bin/activate), or make it (make install)")
    sys.exit(0)


def run_tool(name: str, out: Path, work: Callable[[], None]) -> int:
    """Do the work that writes `out`; return the exit code, with one line on stderr for what the user can mend."""
    from stages.command_line.failures import describe_failure
    from stages.render.terminal import escape_controls

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
