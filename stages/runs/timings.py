"""Estimate how long the stages of a run will take, from finished artifacts of the same settings and dump."""

import re
from collections.abc import Iterable
from pathlib import Path

from stages.artifacts.finished import MANIFEST, MANIFEST_COPY, OLD
from stages.artifacts.lineage import RECIPE, SEED_FOLDER, section_name
from stages.recipe.recipe import Recipe
from stages.recipe.recipe_file import read_mapping
from stages.recipe.schema import SettingsError, complete_settings, result_settings
from stages.render.units import format_duration
from stages.runtime.files import read_json_object

PAIRS, SHARES = "pairs", "pairs-shares"


def estimate_seconds(recipe: Recipe, folders: Iterable[Path]) -> dict[str, float | None]:
    """Return how long each artifact took before, in any run beside this one; None where that is not known.

    Settings other than the seed must be the same. Of several times the longest counts: the time of a stage that was
    resumed leaves out what came before.

    Args:
        folders: of the artifacts.
    """
    folders = list(folders)
    recipes = [path for results in {folder.parent.parent for folder in folders} for path in results.glob(f"*/{RECIPE}")]
    runs = [path.parent for path in recipes if _read_dump(path) == list(recipe.dump)]
    scattered = any(folder.name == SHARES for folder in folders)  # then `pairs` only gathers them
    return {str(folder): None if scattered and folder.name == PAIRS
            else max(_list_seconds(folder.name, runs, recipe), default=None) for folder in folders}


def describe_plan(run: str, seconds: dict[str, float | None]) -> str:
    """Return the first line of a run: what is made, and how long that took before, as far as that is known."""
    stages, seeds = {}, {}
    for folder in map(Path, seconds):
        is_seeded = SEED_FOLDER.fullmatch(folder.parent.name)
        (seeds.setdefault(folder.parent.name, {}) if is_seeded else stages)[folder.name] = None
    per_seed = {}  # seeds of which the same stages are run, in one piece of text
    for seed, names in seeds.items():
        per_seed.setdefault(", ".join(names), []).append(seed)
    parts = [", ".join(stages), *(f"in {', '.join(folders)}: {names}" for names, folders in per_seed.items())]
    return f"{run}: {len(seconds)} stages to run: {'; '.join(filter(None, parts))}; {_describe_time(seconds)}"


def _describe_time(seconds: dict[str, float | None]) -> str:
    """Say how long the stages took before, and which of them have no earlier time."""
    known = [number for number in seconds.values() if number is not None]
    if not known:
        return "no estimate of the time"
    unknown = dict.fromkeys(Path(folder).name for folder, number in seconds.items() if number is None)
    rest = f" without {', '.join(unknown)}, for which there is no estimate" if unknown else ""
    return f"it took about {format_duration(sum(known))} before{rest}"


def _list_seconds(name: str, runs: list[Path], recipe: Recipe) -> list[float]:
    """List the seconds of the finished artifacts of this name in these runs, replaced ones too."""
    seconds, replaced = [], re.compile(rf"{re.escape(name)}-[0-9a-f]+")  # sft-1a2b, not sft-merged-1a2b
    for artifact in (path for run in runs for path in (run / name, *run.glob(f"{OLD}/{name}-*"))):
        if artifact.parent.name == OLD and not replaced.fullmatch(artifact.name):
            continue
        manifest = read_json_object(artifact / MANIFEST_COPY) or read_json_object(artifact / MANIFEST) or {}
        took, stage = manifest.get("seconds"), section_name(str(manifest.get("stage")))
        config = manifest.get("config")
        if not (isinstance(took, int | float) and hasattr(recipe, stage) and isinstance(config, dict)):
            continue
        section = getattr(recipe, stage)
        if complete_settings(section, config) | {"seed": None} == result_settings(section) | {"seed": None}:
            seconds.append(took)
    return seconds


def _read_dump(recipe: Path) -> object:
    try:
        return read_mapping(recipe).get("dump")
    except SettingsError:
        return None
