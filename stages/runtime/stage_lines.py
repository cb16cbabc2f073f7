"""Print lines of a stage on stderr: each begins with the stage's place in the run, as in "[3/9] sft: ...".

The Snakefile says what is planned, and which terminal is behind the pipe to the log, by environment variables; worker
processes inherit them. A stage that is run by hand has no place.
"""

import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from stages.render.units import format_duration

PLAN = "STAGES_PLAN"  # JSON: [folder, seconds or null] of each artifact that this run makes
TERMINAL = "STAGES_TERMINAL"  # path of the terminal that shows the run
PLACE = "STAGES_PLACE"  # "3/9" or "3/9 seed-0", of this process
RUN_ENDS = "STAGES_RUN_ENDS"  # time at which the run will probably end, in seconds since the epoch
SEED = "seed-"  # begins the name of the folder of one of several seeds
CLEAR_LINE = "\r\x1b[K"


def export_plan(seconds: dict[str, float | None], terminal: str | None) -> None:
    """Tell the stages that this process starts what the run makes, and which terminal shows it.

    Args:
        seconds: how long each artifact will probably take, by its folder, in the order they are made; None: unknown.
        terminal: None if the output goes to a file or a pipe.
    """
    os.environ[PLAN] = json.dumps(list(seconds.items()))
    os.environ[TERMINAL] = terminal or ""


def begin_stage(out: Path) -> None:
    """Look up the place of the artifact `out` in the run, and print that it starts."""
    plan = _read_plan()
    folders = [folder for folder, _ in plan]
    folder = next((str(path) for path in (out, out.parent) if str(path) in folders), None)  # a share's is its parent
    if folder is None:
        return
    index = folders.index(folder)
    run = Path(folder).parent.name  # of several seeds, whose stages run side by side, a line says which
    os.environ[PLACE] = f"{index + 1}/{len(plan)}{f' {run}' if run.startswith(SEED) else ''}"
    rest = [seconds for _, seconds in plan[index:]]
    note = ""
    if None not in rest:
        os.environ[RUN_ENDS] = str(time.time() + sum(rest))
        note = f", about {format_duration(sum(rest))} left for the whole run"
    print_line(f"{out.relative_to(Path(folder).parent)}: started at {time.strftime('%H:%M:%S')}{note}")


def add_place(text: str) -> str:
    """Put the stage's place before a line."""
    return f"[{os.environ[PLACE]}] {text}" if PLACE in os.environ else text


def format_run_left() -> str:
    """Return how long the whole run will probably take, as the end of a line; nothing if that is unknown."""
    seconds = float(os.environ.get(RUN_ENDS, 0)) - time.time()
    return f", {format_duration(seconds)} for the whole run" if seconds > 0 else ""


def print_line(text: str) -> None:
    """Print a line, in the place of a bar that is on the terminal."""
    terminal = open_terminal()
    if terminal is not None:
        with suppress(OSError):
            terminal.write(CLEAR_LINE)
            terminal.flush()
        if terminal is not sys.stderr:
            terminal.close()
    print(add_place(text), file=sys.stderr, flush=True)


def open_terminal() -> TextIO | None:
    """Return stderr if it is a terminal, or else a stream to the one behind the log's pipe; None if there is none."""
    if sys.stderr.isatty():
        return sys.stderr
    if not os.environ.get(TERMINAL):
        return None
    try:
        handle = os.open(os.environ[TERMINAL], os.O_WRONLY | os.O_NOCTTY)
    except OSError:  # it was closed, or is on another machine
        return None
    stream = os.fdopen(handle, "w", encoding="utf-8", errors="replace")
    if stream.isatty():
        return stream
    stream.close()
    return None


def _read_plan() -> list[tuple[str, float | None]]:
    try:
        return [(folder, seconds) for folder, seconds in json.loads(os.environ[PLAN])]
    except (KeyError, ValueError, TypeError):
        return []
