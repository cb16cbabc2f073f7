"""List the runs under a folder, and the state of their stages: finished, partial, stale."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from stages.artifacts.artifact import PARTIAL
from stages.artifacts.finished import OLD
from stages.artifacts.lineage import find_run_folder, find_stale_reasons, locate_inputs
from stages.artifacts.manifest import Record, headline_metrics, is_artifact, read_record

DEPTH = 4  # of folders below the root: results/NAME/seed-0/pairs-shares/1-of-50


def list_runs(root: Path) -> list[dict]:
    """Describe each run under `root`, with its stages in their order: each after those that it was made from.

    A run is the folder of a recipe.yaml or, for artifacts made by hand, the folder around them.
    """
    runs: dict[Path, list[Path]] = {}
    for folder in list_artifacts(root):
        runs.setdefault(find_run_folder(folder) or folder.parent, []).append(folder)
    return [{"run": str(run), "stages": [_describe_stage(run, record) for record in sort_by_lineage(folders)]}
            for run, folders in sorted(runs.items())]


def list_artifacts(root: Path) -> list[Path]:
    """List the artifacts under `root`, finished or not."""
    return list(_find_artifacts(root, DEPTH))


def last_write_time(folder: Path) -> str:
    """Return the local time of the newest file, to the minute: it shows whether a partial folder is being written."""
    times = [time for time in map(_modification_time, folder.rglob("*")) if time]
    return datetime.fromtimestamp(max(times, default=_modification_time(folder))).isoformat(" ", "minutes")


def sort_by_lineage(folders: list[Path]) -> list[Record]:
    """Read the artifacts, and sort them by how many steps their longest line of ancestors has, then by name."""
    records = {os.path.realpath(folder): read_record(folder) for folder in sorted(folders)}
    inputs = {folder: [os.path.realpath(path) for path in locate_inputs(record)] for folder, record in records.items()}
    depths: dict[str, int] = {}

    def depth(folder: str) -> int:
        if folder not in depths:
            depths[folder] = 0  # ends a circle, which only damaged manifests have
            depths[folder] = 1 + max((depth(path) for path in inputs[folder] if path in inputs), default=0)
        return depths[folder]

    return sorted(records.values(), key=lambda record: depth(os.path.realpath(record.folder)))


def _find_artifacts(folder: Path, depth: int) -> Iterator[Path]:
    if is_artifact(folder):
        yield folder
    elif depth:
        for name in sorted(_list_subfolders(folder)):
            yield from _find_artifacts(folder / name, depth - 1)


def _list_subfolders(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            return [entry.name for entry in entries
                    if entry.is_dir() and (entry.name == OLD or not entry.name.startswith("."))]
    except OSError:  # no permission
        return []


def _describe_stage(run: Path, record: Record) -> dict:
    folder, manifest, reasons = record.folder, record.manifest, find_stale_reasons(record)
    return {"name": os.path.relpath(folder, run).removesuffix(PARTIAL), "stage": manifest.get("stage"),
            "state": "stale" if reasons and record.state == "finished" else record.state,
            "last_written": last_write_time(folder), "seconds": manifest.get("seconds"),
            "metrics": dict(headline_metrics(manifest.get("metrics", {}))), "stale": reasons,
            "problems": record.problems}


def _modification_time(path: Path) -> float:
    """Return seconds since the epoch; 0 for a file that has been deleted meanwhile."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
