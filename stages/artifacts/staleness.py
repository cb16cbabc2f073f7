"""Tell Snakemake by the times of the manifests what their contents say: finished, or stale.

Snakemake compares times: it would make a copied, cloned or touched run again, and would miss another setting where its
own records are not copied. So before it plans, each manifest gets a time that is right by content: not before those of
its inputs where the artifact is up to date, and `STALE_NS` where it is not. What follows from a stale artifact, a
missing one or --forcerun is Snakemake's to find.
"""

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from stages.artifacts.artifact import MANIFEST, artifact_folder
from stages.artifacts.lineage import RECIPE, SEED_FOLDER, find_stale_reasons, locate_inputs, newest_time_ns
from stages.artifacts.manifest import Record, read_record
from stages.recipe.recipe import Recipe
from stages.recipe.schema import to_dict

STALE_NS = 1_000_000_000  # a second after 1970: before every input
POOLED = ("pool_seeds", "frontier")  # stages that report on several seeds
LOCK = ".lock"  # of the run


def align_times(run: Path, recipe: Recipe, seeded: Mapping[Path, Recipe] | None = None) -> list[str]:
    """Set the times of the manifests in a run's folder; return why artifacts are stale, one line each.

    Nothing is changed while another process is at work on the run.

    Args:
        seeded: of several seeds, the recipe of each by its folder.
    """
    if _is_locked(run):
        return []
    settings = {folder.resolve(): to_dict(resolved) for folder, resolved in {run: recipe, **(seeded or {})}.items()}
    aligner = _Aligner(run.resolve(), settings)
    for folder in (artifact for part in settings for artifact in list_finished(part)):
        aligner.align(folder)
    return aligner.reasons


def list_finished(run: Path) -> Iterator[Path]:
    """List the folders of a run that have a manifest, those of shares included.

    A name with a dot is none of a stage: .old, STAGE.partial, STAGE.set-aside-1. A folder with a recipe is another run.
    """
    for pattern in (f"*/{MANIFEST}", f"*/*/{MANIFEST}"):
        for manifest in sorted(run.glob(pattern)):
            parts = manifest.parent.relative_to(run).parts
            if not any("." in part for part in parts) and (len(parts) == 1 or not (run / parts[0] / RECIPE).exists()):
                yield manifest.parent


def dated_inputs(files: list[str], reasons: list[str], instead: str) -> list[str]:
    """Return the files of the dump that are not dated in the future, for the rule `posts`.

    A time in the future says nothing, and Snakemake counts the job that has read such a file as failed. If none is left
    (nor is there one of a dump on the hub), a stale `posts` gets the file `instead`: what has no input is never older.

    Args:
        reasons: of `align_times`.
    """
    now_ns = time.time_ns()
    usable = [file for file in files if os.stat(file).st_mtime_ns <= now_ns]
    is_stale = any(reason.startswith("posts: ") for reason in reasons)
    return usable or [instead] * is_stale


class _Aligner:
    """The times set so far, and why artifacts are stale."""

    def __init__(self, run: Path, settings: dict[Path, dict]):
        """settings: of the recipe, by the folder of the run; there is none for a run of another seed."""
        self.run, self.settings, self.now_ns = run, settings, time.time_ns()
        self.times_ns: dict[Path, int] = {}
        self.reasons: list[str] = []

    def align(self, folder: Path) -> int:
        """Set the times of one artifact after those of its inputs; return the time of its manifest, in ns."""
        if folder not in self.times_ns:
            self.times_ns[folder] = 0  # ends a circle that somebody has written into manifests
            record = read_record(folder)
            inputs = [path for path in locate_inputs(record) if os.path.exists(path)]
            newest_ns = max(map(self._time_of_input, inputs), default=0)
            # Of the innermost run that the artifact is in; None: those that its recipe.yaml has.
            run = next(parent for parent in folder.parents if parent in self.settings or (parent / RECIPE).exists())
            reasons = _find_reasons(record, self.settings.get(run)) + self._other_seeds(record)
            self.reasons += [f"{folder.relative_to(self.run)}: {reason}" for reason in reasons]
            if not reasons:
                for file in folder.rglob("*"):  # of the report, Snakemake knows more than the manifest
                    _set_time(file, newest_ns, self.now_ns)
            earliest_ns, latest_ns = (STALE_NS, STALE_NS) if reasons else (newest_ns, self.now_ns)
            self.times_ns[folder] = _set_time(folder / MANIFEST, earliest_ns, latest_ns)
        return self.times_ns[folder]

    def _other_seeds(self, record: Record) -> list[str]:
        """Say which seeds a report on several is on, if they are not those that are asked for."""
        wanted = [run.name for run in self.settings if run != self.run]
        sources = record.manifest.get("inputs", {}).get("evaluate")
        if record.manifest.get("stage") not in POOLED or not wanted or not isinstance(sources, list):
            return []
        parts = [artifact_folder(_source_path(source)).parts for source in sources]
        seeds = [next(filter(SEED_FOLDER.fullmatch, path), "?") for path in parts]
        return [] if seeds == wanted else [f"it is on {', '.join(seeds)}"]

    def _time_of_input(self, path: Path) -> int:
        folder = path.resolve()
        if self.run in folder.parents and (folder / MANIFEST).is_file():
            return self.align(folder)
        return min(newest_time_ns(path), self.now_ns)


def _find_reasons(record: Record, settings: dict | None) -> list[str]:
    if record.state == "damaged":
        return record.problems
    dumps = record.manifest.get("inputs", {}).get("dump")
    paths = [_source_path(source) for source in dumps] if isinstance(dumps, list) else []
    if settings and paths and paths != settings["dump"]:
        return [f"it was made from {', '.join(paths)}"]
    return find_stale_reasons(record, settings)


def _source_path(source: object) -> str:
    return str(source.get("path")) if isinstance(source, dict) else "?"


def _set_time(path: Path, earliest_ns: int, latest_ns: int) -> int:
    """Set a file's time to the nearest one between two, and return it."""
    try:
        own_ns = os.lstat(path).st_mtime_ns
        time_ns = min(max(own_ns, earliest_ns), latest_ns)
        if time_ns != own_ns and not os.path.islink(path):
            os.utime(path, ns=(time_ns, time_ns))
    except OSError:  # the file is gone, or not ours
        return latest_ns
    return time_ns


def _is_locked(run: Path) -> bool:
    """Check whether another process is at work on a run, or may be: a lock that cannot be opened counts."""
    try:
        with open(run / LOCK, "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return not isinstance(error, FileNotFoundError)
    return False
