"""The runs and stages under a folder: finished, partial, stale."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from stages.runtime.artifact import MANIFEST, REQUEST
from stages.runtime.lineage import run_of, stale
from stages.runtime.manifest import PARTIAL, headline, is_record, record_of

DEPTH = 3  # folders below the one that is asked for: results/NAME/pairs-shares/1-of-50


def runs(root: Path) -> list[dict]:
    """Each run under `root` with its stages in the order they were made; empty when there is none.

    A run is the folder of a recipe.yaml or, of artifacts made by hand, the folder around them.
    """
    found: dict[Path, list[Path]] = {}
    for folder in _artifacts(root, DEPTH):
        found.setdefault(run_of(folder) or folder.parent, []).append(folder)
    return [{"run": str(run), "stages": [_stage(run, folder) for folder in sorted(folders, key=_made)]}
            for run, folders in sorted(found.items())]


def last_written(folder: Path) -> str:
    """Local time of the newest file, to the minute: of a partial folder, whether someone is at work in it."""
    times = [found for found in map(_time_of, folder.rglob("*")) if found]
    return datetime.fromtimestamp(max(times, default=_time_of(folder))).isoformat(" ", "minutes")


def _artifacts(folder: Path, depth: int) -> Iterator[Path]:
    if is_record(folder):
        yield folder
    elif depth:
        for name in sorted(_folders_in(folder)):
            yield from _artifacts(folder / name, depth - 1)


def _folders_in(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
    except OSError:  # not ours to read
        return []


def _stage(run: Path, folder: Path) -> dict:
    record = record_of(folder)
    reasons = stale(record)
    state = "stale" if reasons and record.state == "finished" else record.state
    return {"name": os.path.relpath(folder, run).removesuffix(PARTIAL), "stage": record.said.get("stage"),
            "state": state, "last_written": last_written(folder), "seconds": record.said.get("seconds"),
            "metrics": dict(headline(record.said.get("metrics", {}))), "stale": reasons, "problems": record.problems}


def _made(folder: Path) -> float:
    return next((found for name in (MANIFEST, REQUEST, "") if (found := _time_of(folder / name))), 0.0)


def _time_of(path: Path) -> float:
    """Seconds since the epoch; 0 for a file that went away meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
