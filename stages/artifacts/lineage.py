"""Trace where an artifact comes from: its inputs, and the pretrained model and data of a model; check if it is stale.

A manifest names each input by its path and by the SHA-256 of the input's own manifest, so comparing one small file
verifies a whole ancestry. Paths in it are relative to the folder that the stage was started in.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts.artifact import MANIFEST, REQUEST, ArtifactError, artifact_folder, digest, read_manifest
from stages.artifacts.manifest import Record, diff_trees, is_artifact, list_input_sources, read_record
from stages.model_files.provenance import Provenance, read_provenance
from stages.recipe.recipe import Recipe, read_mapping
from stages.recipe.schema import SettingsError, complete_settings, list_without_effect, result_settings
from stages.recipe.variants import FOLDER, overrides_of_folder
from stages.render.units import format_bytes
from stages.runtime.files import list_files, used_bytes

RECIPE = "recipe.yaml"
SEED_FOLDER = re.compile(r"seed-\d+")  # of the run of one of several seeds
# Stage: section of the recipe, where their names differ.
SECTIONS = {"gather": "pairs", "judge": "reward", "pool_seeds": "evaluate", "evaluate_prompts": "evaluate",
            "evaluate_reward": "evaluate", "export_reward": "merge"}
MAX_HASHED_BYTES = 256 << 20  # a larger plain input (a dump) is hashed only if it is newer than the artifact
BROKEN = ("changed", "gone", "not finished", "cannot be read")
DESCRIPTIONS = {"changed": "has changed", "gone": "is gone", "not finished": f"has no {MANIFEST}"}


def check_inputs(record: Record) -> list[dict]:
    """Compare every input with its digest in the manifest; return {name, path, sha256, verdict} of each source.

    sha256: None if it came from a hub. verdict: same, not checked (why), or one of BROKEN.
    """
    return [{"name": label, "path": path, "sha256": sha256,
             "verdict": _compare(find_input(record.folder, path), sha256, record.folder)}
            for label, path, sha256 in _list_sources(record)]


def locate_inputs(record: Record) -> list[Path]:
    """Locate every input that the manifest names, without reading it."""
    return [find_input(record.folder, path) for _, path, _ in _list_sources(record)]


def newest_time_ns(path: Path) -> int:
    """Return the time of a file, or of the newest one in a folder, in ns since the epoch; 0 if there is none."""
    times_ns = [0]
    for file in list_files(path):
        with suppress(OSError):  # a running stage deletes files
            times_ns.append(file.stat().st_mtime_ns)
    return max(times_ns)


def find_input(artifact: Path, path: str) -> Path:
    """Locate an input: relative to the folders around the artifact, innermost first, then to the working directory."""
    parents = Path(os.path.abspath(artifact)).parents
    candidates = (parent / artifact_folder(path) for parent in parents)
    return next((folder for folder in candidates if os.path.exists(folder)), artifact_folder(path))


def trace_ancestry(record: Record, visited: set[Path] | None = None) -> list[dict]:
    """Return the inputs as a tree up to the dump; each node has its own `inputs`.

    A node that already appears above is marked `repeated`. A broken link has no inputs: what is there now is not what
    the artifact was made from.
    """
    visited = set() if visited is None else visited
    nodes = []
    for link in check_inputs(record):
        folder = find_input(record.folder, link["path"])
        broken = link["verdict"] in BROKEN
        node = link | {"broken": broken, "repeated": not broken and folder.resolve() in visited, "inputs": []}
        if not broken and not node["repeated"] and is_artifact(folder):
            visited.add(folder.resolve())
            node["inputs"] = trace_ancestry(read_record(folder), visited)
        nodes.append(node)
    return nodes


def find_stale_reasons(record: Record, recipe: dict | None = None) -> list[str]:
    """List why the stage would now make another artifact, one line each; empty if it is up to date, or in .old/.

    Args:
        recipe: the sections' settings; by default those that the run's recipe.yaml has.
    """
    if record.state == "replaced":
        return []
    reasons = [f"its input {link['name']}, {link['path']}, {DESCRIPTIONS.get(link['verdict'], link['verdict'])}"
               for link in check_inputs(record) if link["verdict"] in BROKEN]
    return reasons + _changed_settings(record, recipe)


def diff_from_defaults(record: Record) -> list[dict]:
    """List the settings that differ from the recipe's defaults as {name, a (here), b (default)}."""
    defaults = getattr(Recipe(), section_name(record.manifest.get("stage", "")), None)
    if defaults is None or "config" not in record.manifest:
        return []
    return diff_trees(complete_settings(defaults, record.manifest["config"]), result_settings(defaults))


def find_run_folder(artifact: Path) -> Path | None:
    """Return the folder with the run's recipe: the artifact's parent or, for a share of the pairs, its parent."""
    folders = (Path(os.path.normpath(artifact / up)) for up in ("..", "../.."))
    return next((folder for folder in folders if (folder / RECIPE).is_file()), None)


def section_name(stage: str) -> str:
    """Return the section of the recipe that holds a stage's settings."""
    return SECTIONS.get(stage, stage)


def _list_sources(record: Record) -> list[tuple[str, str, str | None]]:
    """List label, path and SHA-256 of each input."""
    sources = list_input_sources(record.manifest.get("inputs", {})).items()
    return [(label, str(source.get("path", "?")), source.get("sha256") and str(source["sha256"]))
            for label, source in sources if isinstance(source, dict)]


def _compare(path: Path, sha256: str | None, artifact: Path) -> str:
    """Return the verdict on an input."""
    if sha256 is None:
        return "not checked (from a hub)"
    if not os.path.exists(path):  # unlike Path.exists, it accepts names that no file system allows
        return "gone"
    try:
        if not is_artifact(path):
            size_bytes = used_bytes(path)
            made_ns = max(map(newest_time_ns, (artifact / MANIFEST, artifact / REQUEST)))
            if size_bytes > MAX_HASHED_BYTES and newest_time_ns(path) <= made_ns:
                return f"not checked ({format_bytes(size_bytes)}, not newer)"
        return "same" if digest(path) == sha256 else "changed"
    except ArtifactError:
        return "not finished"
    except OSError:
        return "cannot be read"


def _changed_settings(record: Record, recipe: dict | None) -> list[str]:
    run, section = find_run_folder(record.folder), section_name(record.manifest.get("stage", ""))
    if (run is None and recipe is None) or "config" not in record.manifest:
        return []
    try:
        recipe = read_mapping(run / RECIPE) if recipe is None else recipe
        settings, frontier = recipe.get(section), recipe.get(FOLDER)
        is_variant = isinstance(frontier, dict) and run and (run / FOLDER).resolve() == record.folder.resolve().parent
        overrides = overrides_of_folder(record.folder.name, frontier) if is_variant else {}
    except SettingsError as error:
        return [str(error)]
    if not isinstance(settings, dict):
        return []
    kind = getattr(Recipe(), section, None)
    ignored = list_without_effect(kind)
    settings = {name: value for name, value in complete_settings(kind, settings | overrides).items()
                if name not in ignored}
    return [f"{section}.{row['name']} is {row.get('a', 'absent')!r}, {RECIPE} says {row.get('b', 'absent')!r}"
            for row in diff_trees(complete_settings(kind, record.manifest["config"]), settings)]


@dataclass(frozen=True)
class Origin:
    """What a model was made from.

    base: hub id or folder of the pretrained model, 'scratch' for the pipeline's own, None when unknown. pairs: metrics
    of the pairs it learnt from. datasets: ids on the Hub, none if the posts came from a dump. provenance: where the
    pretrained model's weights are from, if its folder says so.
    """

    base: str | None = None
    pairs: dict = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    provenance: Provenance | None = None

    def describe_base(self) -> str:
        """Say which pretrained model it was, and what is known of it: licence, chat, rounding; '' if none is."""
        return f"{self.provenance.name} ({self.provenance.describe()})" if self.provenance else self.base or ""


def find_origin(base: Path, pairs: Path | None) -> Origin:
    """Find the origin of a model that starts from `base` and learns from `pairs`, if any; without manifests, less is
    known.
    """
    name, provenance = find_pretrained(base)
    if pairs is None:
        return Origin(name, provenance=provenance)
    counts = pairs / "metrics.json"
    return Origin(name, json.loads(counts.read_text(encoding="utf-8")) if counts.is_file() else {},
                  find_hub_datasets(pairs), provenance)


def find_pretrained(folder: Path) -> tuple[str | None, Provenance | None]:
    """Follow a model's ancestors to the pretrained one; return its name in the recipe, and where it is from.

    Each is None if it is not known.
    """
    visited = set()
    while folder not in visited and (folder / MANIFEST).is_file():
        visited.add(folder)  # a path may name another artifact by now, even this one
        manifest = read_manifest(folder)
        if manifest.get("stage") == "base":
            return manifest["config"]["model"], read_provenance(folder)
        inputs = manifest.get("inputs", {})
        source = inputs.get("base") or inputs.get("policy")
        if source is None:
            break
        folder = find_input(folder, source["path"])
    return None, None


def find_hub_datasets(folder: Path) -> list[str]:
    """Return the ids of the data sets on the Hub that the posts of a data artifact came from."""
    if not (folder / MANIFEST).is_file():
        return []
    sources = list_input_sources(read_manifest(folder).get("inputs", {})).values()
    return sorted({name for source in sources for name in (
        [source["path"]] if source["sha256"] is None else find_hub_datasets(find_input(folder, source["path"])))})
