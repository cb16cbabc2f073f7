"""Compare runs, or artifacts alone, by their manifests: settings, numbers with intervals, digests of files."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts.artifact import ArtifactError
from stages.artifacts.lineage import RECIPE, check_inputs, find_run_folder, section_name
from stages.artifacts.listing import list_artifacts, sort_by_lineage
from stages.artifacts.manifest import Record, flatten_tree, is_artifact, read_record
from stages.recipe.algorithms import EVALUATE
from stages.recipe.recipe import Recipe, read_mapping
from stages.recipe.schema import list_without_effect
from stages.render.terminal import format_setting
from stages.render.units import format_duration
from stages.runtime.files import DIGEST_CHARACTERS

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
        raise ArtifactError(f"{folder} holds several runs: give one of {', '.join(_list_runs(finished))}")
    return Run(folder, finished)


def list_settings(run: Run) -> dict[str, Any]:
    """Return the dump and the settings by section: of the artifacts or, where a stage has none, of the recipe."""
    recipe = read_mapping(run.folder / RECIPE) if (run.folder / RECIPE).is_file() else {}
    planned = {name: _drop_logging(name, values) for name, values in recipe.items() if isinstance(values, dict)}
    dump = {"dump": recipe["dump"]} if "dump" in recipe else {}
    return dump | planned | {section_name(record.manifest.get("stage", name)): record.manifest.get("config", {})
                             for name, record in run.artifacts.items()}


def common_settings(runs: list[Run]) -> list[dict[str, Any]]:
    """Return the settings of each run, of the sections that all of them have."""
    settings = list(map(list_settings, runs))
    names = [name for name in settings[0] if all(name in other for other in settings)]
    return [{name: values[name] for name in names} for values in settings]


def list_numbers(run: Run) -> dict[tuple[str, str], dict]:
    """Return {mean, low, high} of each artifact's numbers by (artifact, name), those of evaluations first.

    low and high are None where there is no interval.
    """
    manifests = {name: run.artifacts[name].manifest for name in sorted(
        run.artifacts, key=lambda name: not is_evaluation(name))}
    return {(artifact, name): estimate for artifact, manifest in manifests.items()
            if manifest.get("stage") not in WITHOUT_HEADLINES
            for name, estimate in fold_intervals(manifest.get("metrics", {})).items()}


def is_evaluation(name: str) -> bool:
    """Check whether an artifact's folder is called as the evaluation of an algorithm: evaluate, evaluate-dpo."""
    return name.partition("-")[0] == EVALUATE


def fold_intervals(metrics: dict) -> dict[str, dict]:
    """Fold {x, x_low, x_high} into {x: {mean, low, high}}; what is no number is left out."""
    numbers = {name: value for name, value in metrics.items()
               if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: {"mean": value, "low": numbers.get(name + LOW), "high": numbers.get(name + HIGH)}
            for name, value in numbers.items() if not _is_end(name, numbers)}


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
    links = check_inputs(record)
    return {**{key: record.manifest[key] for key in CODE_KEYS if key in record.manifest},
            **{f"input {link.name}": (link.sha256 or link.path)[:DIGEST_CHARACTERS] for link in links}}


def _compare_numbers(runs: list[Run]) -> Table:
    """List the numbers worth showing: evaluations' all, others where they differ."""
    numbers, rows = list(map(list_numbers, runs)), []
    for artifact, name in dict.fromkeys(key for values in numbers for key in values):
        estimates = [values.get((artifact, name)) for values in numbers]
        if is_evaluation(artifact) or any(estimate != estimates[0] for estimate in estimates):
            rows.append([f"{artifact}: {name.replace('_', ' ')}", *map(_format_estimate, estimates)])
            if len(runs) == 2:
                a, b = estimates
                rows[-1].append(f"{b['mean'] - a['mean']:.4g}" if a and b else MISSING)
    return rows


def _format_estimate(estimate: dict | None) -> str:
    if estimate is None:
        return MISSING
    mean, *ends = (f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
                   for value in estimate.values() if value is not None)
    return f"{mean} [{', '.join(ends)}]" if ends else mean


def _compare_files(runs: list[Run]) -> Table:
    """List a digest of the files of each artifact, equal where all bytes are; manifests also hold times."""
    rows = []
    for name in dict.fromkeys(name for run in runs for name in run.artifacts):
        files = [_list_digests(run.artifacts[name]) if name in run.artifacts else None for run in runs]
        present = [digests for digests in files if digests is not None]
        differing = sorted(file for file in set().union(*present)
                           if any(digests.get(file) != present[0].get(file) for digests in present))
        rows.append([name, *(MISSING if digests is None else _digest_files(digests) for digests in files),
                     ", ".join(differing)])
    return rows


def _list_digests(record: Record) -> dict[str, str]:
    return {file: str(entry.get("sha256")) for file, entry in record.manifest.get("files", {}).items()
            if isinstance(entry, dict)}


def _digest_files(digests: dict[str, str]) -> str:
    lines = sorted(f"{name} {digest}" for name, digest in digests.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _drop_logging(section: str, settings: dict) -> dict:
    """Drop the settings that change no result, which manifests do not have either."""
    ignored = list_without_effect(getattr(Recipe(), section, None))
    return {name: value for name, value in settings.items() if name not in ignored}


def _is_end(name: str, numbers: dict) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in numbers for end in (LOW, HIGH))


def _list_runs(names: dict) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})
