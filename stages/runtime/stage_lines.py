"""Print lines of a stage on stderr: each begins with the stage's place in the run, as in "[3/9] sft: ...".

The Snakefile says what is planned, and which terminal is behind the pipe to the log, by environment variables; worker
processes inherit them. A stage that is run by hand has no place.
"""

import errno
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

from stages.render.units import format_duration
from stages.runtime.files import PARTIAL

PLAN = "STAGES_PLAN"  # JSON: [folder, seconds or null] of each artifact that this run makes
TERMINAL = "STAGES_TERMINAL"  # path of the terminal that shows the run
SCHEDULE = "STAGES_SCHEDULE"  # JSON of the Schedule of this process
SEED = "seed-"  # begins the name of the folder of one of several seeds
CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True)
class Schedule:
    """The place of a stage in the run, and how long the rest of it will take, as far as earlier runs tell.

    place: "3/9" or "3/9 seed-0". out: the artifact that is made. started: when, in seconds since the epoch.
    stage_seconds: of this stage; None: unknown. later_seconds: of the stages after it, without those of unknown time.
    has_unknown: whether there are any of these.
    """

    place: str
    out: str
    started: float
    stage_seconds: float | None
    later_seconds: float
    has_unknown: bool

    def describe_start(self) -> str:
        """Say how long the run will take from the start of this stage on."""
        known_seconds = (self.stage_seconds or 0) + self.later_seconds
        if not known_seconds:
            return "no estimate for the whole run"
        bound = "over" if self.has_unknown or self.stage_seconds is None else "about"
        return f"{bound} {format_duration(known_seconds)} left for the whole run"

    def run_seconds_left(self, bar_seconds: float, is_stage: bool) -> float | None:
        """Estimate how long the run will take from now on, stages of unknown time left out; None: no estimate.

        Args:
            bar_seconds: how long the work that is shown will take.
            is_stage: it is most of the stage: then its progress tells more than earlier runs.
        """
        if is_stage:
            return bar_seconds + self.later_seconds
        if self.stage_seconds is None:
            return None
        return max(bar_seconds, self.stage_seconds - (time.time() - self.started)) + self.later_seconds


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
    plan = json.loads(os.environ.get(PLAN, "[]"))
    folders = [folder for folder, _ in plan]
    folder = next((str(path) for path in (out, out.parent) if str(path) in folders), None)  # a share's is its parent
    if folder is None:
        return
    index = folders.index(folder)
    run = Path(folder).parent.name  # of several seeds, whose stages run side by side, a line says which
    place = f"{index + 1}/{len(plan)}{f' {run}' if run.startswith(SEED) else ''}"
    later = [seconds for _, seconds in plan[index + 1:]]
    schedule = Schedule(place, str(out), time.time(), plan[index][1], sum(filter(None, later)), None in later)
    os.environ[SCHEDULE] = json.dumps(asdict(schedule))
    print_line(f"{out.relative_to(Path(folder).parent)}: started at {time.strftime('%H:%M:%S')}, "
               f"{schedule.describe_start()}")


def add_place(text: str) -> str:
    """Put the stage's place before a line."""
    schedule = _read_schedule()
    return f"[{schedule.place}] {text}" if schedule else text


def format_run_left(bar_seconds: float, is_stage: bool) -> str:
    """Return how long the whole run will probably take, as the end of a line; nothing if that is unknown.

    See Schedule.run_seconds_left for the arguments.
    """
    schedule = _read_schedule()
    seconds = schedule and schedule.run_seconds_left(bar_seconds, is_stage)
    if not seconds:
        return ""
    return f", {'over ' * schedule.has_unknown}{format_duration(seconds)} for the whole run"


def is_stage_folder(folder: Path) -> bool:
    """Check whether a folder is that of the artifact that is made, and not a folder in it."""
    schedule = _read_schedule()
    return schedule is not None and str(folder) == f"{schedule.out}{PARTIAL}"


def print_line(text: str) -> None:
    """Print a line, in the place of a bar that is on the terminal."""
    terminal = open_terminal()
    if terminal is not None:
        with suppress(OSError):
            terminal.write(CLEAR_LINE)
            terminal.flush()
        if terminal is not sys.stderr:
            terminal.close()
    try:
        print(add_place(text), file=sys.stderr, flush=True)
    except OSError as error:
        if error.errno != errno.EIO:  # stderr is a terminal that was closed: the work goes on, to its checkpoint
            raise


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


def _read_schedule() -> Schedule | None:
    return Schedule(**json.loads(os.environ[SCHEDULE])) if SCHEDULE in os.environ else None
