"""List the runs under a folder with the state of their stages; compare runs, or artifacts alone, by their manifests.

A stage is finished, partial or stale. Compared are settings, numbers with intervals, and digests of files.
"""

import os
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from stages.artifacts.artifact import OLD, ArtifactError, digest_request
from stages.artifacts.lineage import (
    RECIPE,
    check_inputs,
    find_run_folder,
    find_stale_reasons,
    locate_inputs,
    newest_time_ns,
    section_name,
)
from stages.artifacts.manifest import Record, flatten_tree, headline_metrics, is_artifact, read_record
from stages.recipe.algorithms import EVALUATE
from stages.recipe.recipe import Recipe, read_mapping
from stages.recipe.schema import list_without_effect
from stages.render.terminal import format_setting
from stages.render.units import format_duration
from stages.runtime.files import DIGEST_CHARACTERS, PARTIAL

DEPTH = 4  # of folders below the root: results/NAME/seed-0/pairs-shares/1-of-50
WITHOUT_HEADLINES = ("merge", "report")
LOW, HIGH = "_low", "_high"  # ends of the names of an interval's ends
CODE_KEYS = ("commit", "python", "device", "versions")
MISSING = "–"
Table = list[list[str]]  # rows of a name and a cell per run, and what follows; the first row is the head


@dataclass(frozen=True)
class Run:
    """A folder of artifacts: the finished ones by their path in it, in the order they were made.

    Or one artifact alone, finished or not, by its stage.
    """

    folder: Path
    artifacts: dict[str, Record]


def list_runs(root: Path) -> list[dict]:
    """Describe each run under `root`, with its stages in their order: each after those that it was made from.

    A run is the folder of a recipe.yaml or, for artifacts made by hand, the folder around them.
    """
    runs: dict[Path, list[Path]] = {}
    for folder in list_artifacts(root):
        runs.setdefault(find_run_folder(folder) or folder.parent, []).append(folder)
    return [{"run": str(run), "stages": [_describe_stage(run, record) for record in sort_by_lineage(folders)]}
            for run, folders in sorted(runs.items())]


def list_artifacts(root: Path, depth: int = DEPTH) -> list[Path]:
    """List the artifacts under `root`, finished or not."""
    if is_artifact(root):
        return [root]
    try:
        folders = sorted(entry.name for entry in os.scandir(root) if entry.is_dir()) if depth else []
    except OSError:  # no permission
        folders = []
    return [artifact for name in folders if name == OLD or not name.startswith(".")
            for artifact in list_artifacts(root / name, depth - 1)]


def last_write_time(folder: Path) -> str:
    """Return the local time of the newest file, to the minute: it shows whether a partial folder is being written."""
    time_ns = newest_time_ns(folder) or folder.stat().st_mtime_ns
    return datetime.fromtimestamp(time_ns / 1e9).isoformat(" ", "minutes")


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


def compare_runs(runs: dict[str, Run]) -> dict[str, Table]:
    """Compare runs in tables by title."""
    tables = {"Runs": _describe_runs(list(runs.values())),
              "Settings": _list_differing(common_settings(list(runs.values()))),
              "Code and inputs": _list_differing([_list_code_and_inputs(run) for run in runs.values()]),
              "Numbers": _compare_numbers(list(runs.values())),
              "Artifacts": _compare_files(list(runs.values()))}
    last = {"Numbers": ["difference"] * (len(runs) == 2), "Artifacts": ["files that differ"]}
    return {title: [["", *runs, *last.get(title, [])], *rows] for title, rows in tables.items() if rows}


def read_run(folder: Path) -> Run:
    """Read the manifests of a run or of one artifact; ArtifactError if the folder holds no finished artifact."""
    if not folder.is_dir():
        raise ArtifactError(f"there is no run {folder}: give the folder of a run, such as results/demo")
    if is_artifact(folder):
        record = read_record(folder)
        return Run(folder, {record.manifest.get("stage", folder.name): record})
    folders = list_artifacts(folder)
    if (folder / RECIPE).exists():  # then those with a recipe beneath it, of several seeds, are other runs
        folders = [artifact for artifact in folders if os.path.samefile(find_run_folder(artifact), folder)]
    records = {str(record.folder.relative_to(folder)): record for record in sort_by_lineage(folders)}
    finished = {name: record for name, record in records.items() if record.state == "finished"}
    if not finished:
        raise ArtifactError(f"{folder} has no finished artifact: run a stage first")
    if all("/" in name for name in finished) and not (folder / RECIPE).exists():
        raise ArtifactError(f"{folder} holds several runs: give one of "
                            f"{', '.join(sorted({name.partition('/')[0] for name in finished}))}")
    return Run(folder, finished)


def list_settings(run: Run) -> dict[str, Any]:
    """Return the dump and the settings by section: of the artifacts or, where a stage has none, of the recipe."""
    recipe = read_mapping(run.folder / RECIPE) if (run.folder / RECIPE).is_file() else {}
    settings = {"dump": recipe["dump"]} if "dump" in recipe else {}
    for section, values in recipe.items():
        if isinstance(values, dict):
            ignored = list_without_effect(getattr(Recipe(), section, None))  # manifests do not have them either
            settings[section] = {name: value for name, value in values.items() if name not in ignored}
    return settings | {section_name(record.manifest.get("stage", name)): record.manifest.get("config", {})
                       for name, record in run.artifacts.items()}


def common_settings(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the settings of each run, of the sections that all of them have."""
    settings = list(map(list_settings, runs))
    names = [name for name in settings[0] if all(name in other for other in settings)]
    return [{name: values[name] for name in names} for values in settings]


def list_numbers(run: Run) -> dict[tuple[str, str], tuple]:
    """Return (value, low, high) of each artifact's numbers by (artifact, name), those of evaluations first.

    low and high are None where there is no interval.
    """
    numbers = {}
    for artifact in sorted(run.artifacts, key=lambda name: not is_evaluation(name)):
        manifest = run.artifacts[artifact].manifest
        metrics = {} if manifest.get("stage") in WITHOUT_HEADLINES else manifest.get("metrics", {})
        values = {name: value for name, value in metrics.items()
                  if isinstance(value, int | float) and not isinstance(value, bool)}
        ends = {name + end for name in values for end in (LOW, HIGH)}
        numbers |= {(artifact, name): (value, values.get(name + LOW), values.get(name + HIGH))
                    for name, value in values.items() if name not in ends}
    return numbers


def _describe_stage(run: Path, record: Record) -> dict:
    folder, manifest, reasons = record.folder, record.manifest, find_stale_reasons(record)
    return {"name": os.path.relpath(folder, run).removesuffix(PARTIAL), "stage": manifest.get("stage"),
            "state": "stale" if reasons and record.state == "finished" else record.state,
            "last_written": last_write_time(folder), "seconds": manifest.get("seconds"),
            "metrics": dict(headline_metrics(manifest.get("metrics", {}))), "stale": reasons,
            "problems": record.problems}


def is_evaluation(name: str) -> bool:
    """Check whether an artifact's folder is called as the evaluation of an algorithm: evaluate, evaluate-dpo."""
    return name.partition("-")[0] == EVALUATE


def _describe_runs(runs: list[Run]) -> Table:
    columns = []
    for run in runs:
        records = list(run.artifacts.values())
        manifests = [record.manifest for record in records]
        sites = [site for manifest in manifests if manifest.get("stage") == "posts"
                 for site in manifest.get("metrics", {}).get("sites", {})]
        states = {"; ".join([record.state, *record.problems]) for record in records}
        columns.append({
            "folder": str(run.folder), "sites": ", ".join(sites) or MISSING,
            "artifacts": f"{len(records)} {' / '.join(sorted(states))}",
            "time": format_duration(sum(manifest.get("seconds", 0) for manifest in manifests)),
            "device": ", ".join(sorted({str(manifest.get("device")) for manifest in manifests})),
            "commit": ", ".join(sorted({str(manifest.get("commit"))[:DIGEST_CHARACTERS] for manifest in manifests}))})
    return [[name, *(column[name] for column in columns)] for name in columns[0]]


def _list_differing(trees: list[dict]) -> Table:
    """List the values that are not the same in all trees."""
    leaves = [flatten_tree(tree, lists=False) if tree else {} for tree in trees]
    names = dict.fromkeys(name for values in leaves for name in values)
    rows = [[name, *(format_setting(values[name]) if name in values else MISSING for values in leaves)]
            for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]


def _list_code_and_inputs(run: Run) -> dict:
    """Return the code and the inputs of an artifact alone, these by digest or, from a hub, by name; {} for a run."""
    if not is_artifact(run.folder):
        return {}
    [record] = run.artifacts.values()
    return {**{key: record.manifest[key] for key in CODE_KEYS if key in record.manifest},
            **{f"input {link['name']}": (link["sha256"] or link["path"])[:DIGEST_CHARACTERS]
               for link in check_inputs(record)}}


def _compare_numbers(runs: list[Run]) -> Table:
    """List the numbers worth showing: evaluations' all, others where they differ."""
    numbers, rows = list(map(list_numbers, runs)), []
    for artifact, name in dict.fromkeys(key for values in numbers for key in values):
        estimates = [values.get((artifact, name)) for values in numbers]
        if is_evaluation(artifact) or any(estimate != estimates[0] for estimate in estimates):
            rows.append([f"{artifact}: {name.replace('_', ' ')}", *map(_format_estimate, estimates)])
            if len(runs) == 2:
                a, b = estimates
                rows[-1].append(f"{b[0] - a[0]:.4g}" if a and b else MISSING)
    return rows


def _format_estimate(estimate: tuple | None) -> str:
    if estimate is None:
        return MISSING
    value, *ends = (f"{number:,}" if isinstance(number, int) else f"{number:.4g}"
                    for number in estimate if number is not None)
    return f"{value} [{', '.join(ends)}]" if ends else value


def _compare_files(runs: list[Run]) -> Table:
    """List a digest of the files of each artifact, equal where all bytes are; manifests also hold times."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.artifacts):
        files = [_list_digests(run.artifacts[name]) if name in run.artifacts else None for run in runs]
        present = [digests for digests in files if digests is not None]
        differing = {file for digests in present for file, _ in digests.items() ^ present[0].items()}
        rows.append([name, *(MISSING if digests is None else digest_request(digests) for digests in files),
                     ", ".join(sorted(differing))])
    return rows


def _list_digests(record: Record) -> dict[str, str]:
    return {file: str(entry.get("sha256")) for file, entry in record.manifest.get("files", {}).items()
            if isinstance(entry, dict)}
