"""Follow a stage that another process makes: what it shows of its progress, its last metrics, whether it still runs.

It reads the file that the stage writes beside its artifact (runtime/progress.py), and the series in NAME.partial.
"""

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from stages.artifacts.artifact import MANIFEST, PARTIAL, ArtifactError, artifact_folder
from stages.artifacts.manifest import headline_metrics, read_record
from stages.inspection.artifact_facts import read_last_rows
from stages.render.terminal import escape_controls, format_value
from stages.render.units import format_duration
from stages.runtime.progress import ENDING, is_running, read_progress
from stages.runtime.series import HISTORY_FILES

TERMINAL_EVERY_SECONDS, LOG_EVERY_SECONDS = 2.0, 60.0
STALE_SECONDS, STALE_WAITS = 300.0, 3  # without progress: at least so long, and so many times the longest wait before
ROWS = 3
UP_AND_CLEAR = "\x1b[{}F\x1b[J"
EXIT_CODES = {"finished": 0, "ended": 1}


def watch(path: Path, as_json: bool = False, stream: TextIO | None = None, sleep: Callable[[float], None] = time.sleep
          ) -> int:
    """Show where a stage is until it is finished (0) or its process has ended without a result (1).

    On a terminal the lines are drawn in place, every two seconds; otherwise there is a line a minute.

    Raises ArtifactError if nobody makes or has made the artifact `path`.
    """
    stream = stream or sys.stdout
    in_place = stream.isatty() and not as_json
    drawn = 0
    while True:
        facts = observe(path, time.time())
        if in_place:
            width = shutil.get_terminal_size().columns - 1
            lines = [part for line in format_page(facts) for part in textwrap.wrap(
                escape_controls(line), width, subsequent_indent="    ")]
            stream.write(UP_AND_CLEAR.format(drawn) if drawn else "")
            drawn = len(lines)
        else:
            lines = [json.dumps(facts, default=str) if as_json else escape_controls(format_line(facts))]
        stream.write("".join(f"{line}\n" for line in lines))
        stream.flush()
        if facts["state"] in EXIT_CODES:
            return EXIT_CODES[facts["state"]]
        sleep(TERMINAL_EVERY_SECONDS if in_place else LOG_EVERY_SECONDS)


def observe(path: Path, now: float) -> dict:
    """Return the facts about the stage that makes an artifact, at this time in seconds since the epoch.

    state: running; stale, without progress for long; ended, without a result; finished.
    """
    out = artifact_folder(path)
    out = out.with_name(out.name.removesuffix(PARTIAL))
    progress, partial = read_progress(out), out.with_name(out.name + PARTIAL)
    if progress is None:
        return _observe_finished(out)
    waited = max(0.0, now - progress["at"])
    runs = is_running(progress)
    is_stale = waited > max(STALE_SECONDS, STALE_WAITS * progress.get("longest_wait_seconds", 0.0))
    state = "ended" if "ended" in progress or runs is False else "stale" if is_stale else "running"
    return {"artifact": str(out), "state": state, **progress, "is_here": runs is not None, "waited_seconds": waited,
            "seconds": max(0.0, now - progress["started"]), "checkpoint": _find_checkpoint(partial, now),
            "rows": [row for name in HISTORY_FILES for row in read_last_rows(partial / name)[-ROWS:]]}


def format_page(facts: dict) -> list[str]:
    """Format the facts as lines."""
    lines = [f"{facts['artifact']}: {_describe_state(facts)}"]
    if facts["state"] == "finished":
        return lines
    lines += [f"  {facts['line']}"] if "line" in facts else []
    lines += [f"  last checkpoint: {facts['checkpoint']}"] if facts["checkpoint"] else []
    return lines + [f"  {_format_row(row)}" for row in facts["rows"]]


def format_line(facts: dict) -> str:
    """Format the facts as one line, for a log."""
    if facts["state"] == "running" and "line" in facts:
        return f"{facts['artifact']}: {facts['line']}, {format_duration(facts['waited_seconds'])} ago"
    return f"{facts['artifact']}: {_describe_state(facts)}"


def _describe_state(facts: dict) -> str:
    if facts["state"] == "finished":
        numbers = "".join(f", {name} {format_value(value)}" for name, value in headline_metrics(facts["metrics"]))
        return f"finished, made in {format_duration(facts['seconds'])}{numbers}"
    process, waited = f"process {facts.get('pid')} on {facts.get('host')}", format_duration(facts["waited_seconds"])
    if "ended" in facts:
        return f"not finished, {process} has ended {waited} ago: {facts['ended']}"
    if facts["state"] == "ended":
        return (f"not finished, {process} is gone; its last sign of life was {waited} ago: the same command "
                f"continues")
    if facts["state"] == "stale":
        longest = format_duration(facts.get("longest_wait_seconds", 0.0))
        rest = "it still runs" if facts["is_here"] else "whether it still runs cannot be seen from this machine"
        return f"no progress for {waited}, the longest wait before was {longest}; {process}: {rest}"
    progress = f"last progress {waited} ago" if "line" in facts else "no progress to show yet"
    return f"running for {format_duration(facts['seconds'])}, {process}, {progress}"


def _observe_finished(out: Path) -> dict:
    """Return the facts about a finished artifact; ArtifactError if there is none and nobody makes it."""
    if (out / MANIFEST).is_file():
        manifest = read_record(out).manifest
        return {"artifact": str(out), "state": "finished", "seconds": manifest.get("seconds", 0.0),
                "metrics": manifest.get("metrics", {})}
    if out.with_name(out.name + PARTIAL).is_dir():
        raise ArtifactError(f"{out} is not finished, and no process makes it: its command continues it")
    if not out.is_dir():
        raise ArtifactError(f"there is no {out}, and no process makes it")
    names = sorted(file.name[1:].removesuffix(ENDING) for file in out.glob(f".*{ENDING}"))
    raise ArtifactError(f"{out} is no artifact: name one that is being made"
                        + (f", as {out / names[0]}" if names else ", of which there is none in it"))


def _find_checkpoint(partial: Path, now: float) -> str | None:
    """Return the name and the age of the newest checkpoint of the stage's training."""
    seals = [seal for pattern in ("", "*/", "*/*/") for seal in partial.glob(f"{pattern}checkpoint-*/complete.json")]
    with suppress(OSError, ValueError):  # a newer one has just taken its place, or there is none yet
        saved, name = max((seal.stat().st_mtime, seal.parent.name) for seal in seals)
        return f"{name}, {format_duration(max(0.0, now - saved))} ago"
    return None


def _format_row(row: dict) -> str:
    (name, number), *metrics = row.items() or [("row", "")]
    return f"{name} {format_value(number)}: " + ", ".join(f"{key} {format_value(value)}" for key, value in metrics)
