"""Read a run's finished artifacts, to compare runs: settings, digests of files, headline numbers with intervals."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.recipe.algorithms import EVALUATE
from stages.recipe.recipe import Recipe
from stages.recipe.recipe_file import read_mapping
from stages.recipe.schema import list_without_effect
from stages.runs.lineage import RECIPE, find_run_folder, section_name
from stages.runs.listing import list_artifacts, sort_by_lineage
from stages.runtime.artifact import ArtifactError
from stages.runtime.manifest import Record, is_artifact

WITHOUT_HEADLINES = ("merge", "report")
LOW, HIGH = "_low", "_high"  # ends of the names of an interval's ends


@dataclass(frozen=True)
class Run:
    """A folder of artifacts: the finished ones by their path in it, in the order they were made."""

    folder: Path
    artifacts: dict[str, Record]


def read_run(folder: Path) -> Run:
    """Read the manifests of a run; ArtifactError if the folder holds no finished artifact."""
    if not folder.is_dir():
        raise ArtifactError(f"there is no run {folder}: give the folder of a run, such as results/demo")
    if is_artifact(folder):
        raise ArtifactError(f"{folder} is an artifact, not a run: give the folder around it, or artifacts alone")
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


def list_digests(run: Run) -> dict[str, dict[str, str]]:
    """Return the SHA-256 of each file of each artifact. Manifests also hold times, and differ between equal runs."""
    return {name: {file: str(entry.get("sha256")) for file, entry in record.manifest.get("files", {}).items()
                   if isinstance(entry, dict)} for name, record in run.artifacts.items()}


def list_headlines(run: Run) -> dict[str, dict[str, dict]]:
    """Return each artifact's numbers as {name: {mean, low, high}}, those of evaluations first.

    low and high are None where there is no interval.
    """
    names = sorted(run.artifacts, key=lambda name: not is_evaluation(name))
    manifests = {name: run.artifacts[name].manifest for name in names}
    return {name: fold_intervals(manifest.get("metrics", {})) for name, manifest in manifests.items()
            if manifest.get("stage") not in WITHOUT_HEADLINES}


def compare_headlines(headlines: list[dict[str, dict[str, dict]]]) -> dict[tuple[str, str], list[dict | None]]:
    """List the numbers worth showing of several runs, by (artifact, name): evaluations' all, others where they differ.

    headlines: of each run, as `list_headlines` returns them. A run without the number has None.
    """
    artifacts = dict.fromkeys(artifact for numbers in headlines for artifact in numbers)
    names = {artifact: dict.fromkeys(name for numbers in headlines for name in numbers.get(artifact, {}))
             for artifact in artifacts}
    rows = {(artifact, name): [numbers.get(artifact, {}).get(name) for numbers in headlines]
            for artifact in artifacts for name in names[artifact]}
    return {key: estimates for key, estimates in rows.items()
            if is_evaluation(key[0]) or any(estimate != estimates[0] for estimate in estimates)}


def is_evaluation(name: str) -> bool:
    """Check whether an artifact's folder is called as the evaluation of an algorithm: evaluate, evaluate-dpo."""
    return name.partition("-")[0] == EVALUATE


def fold_intervals(metrics: dict) -> dict[str, dict]:
    """Fold {x, x_low, x_high} into {x: {mean, low, high}}; what is no number is left out."""
    numbers = {name: value for name, value in metrics.items()
               if isinstance(value, int | float) and not isinstance(value, bool)}
    return {name: {"mean": value, "low": numbers.get(name + LOW), "high": numbers.get(name + HIGH)}
            for name, value in numbers.items() if not _is_end(name, numbers)}


def _drop_logging(section: str, settings: dict) -> dict:
    """Drop the settings that change no result, which manifests do not have either."""
    ignored = list_without_effect(getattr(Recipe(), section, None))
    return {name: value for name, value in settings.items() if name not in ignored}


def _is_end(name: str, numbers: dict) -> bool:
    return any(name.endswith(end) and name.removesuffix(end) in numbers for end in (LOW, HIGH))


def _list_runs(names: dict) -> list[str]:
    return sorted({name.partition("/")[0] for name in names})
