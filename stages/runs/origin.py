"""Find what a model comes from, for its card: the pretrained model, the sites and licences, data sets on the Hub."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from stages.runs.lineage import find_input
from stages.runtime.artifact import read_manifest
from stages.runtime.finished import MANIFEST
from stages.runtime.manifest import list_input_sources


@dataclass(frozen=True)
class Origin:
    """What a model was made from.

    base: hub id or folder of the pretrained model, 'scratch' for the pipeline's own, None when unknown. pairs: metrics
    of the pairs it learnt from. datasets: ids on the Hub, none if the posts came from a dump.
    """

    base: str | None = None
    pairs: dict = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)


def find_origin(base: Path, pairs: Path | None) -> Origin:
    """Find the origin of a model that starts from `base` and learns from `pairs`, if any; without manifests, less is
    known.
    """
    if pairs is None:
        return Origin(find_pretrained(base))
    counts = pairs / "metrics.json"
    return Origin(find_pretrained(base), json.loads(counts.read_text(encoding="utf-8")) if counts.is_file() else {},
                  find_hub_datasets(pairs))


def find_pretrained(folder: Path) -> str | None:
    """Follow a model's ancestors to the pretrained one, and return its name in the recipe; None if it is not known."""
    visited = set()
    while folder not in visited and (folder / MANIFEST).is_file():
        visited.add(folder)  # a path may name another artifact by now, even this one
        manifest = read_manifest(folder)
        if manifest.get("stage") == "base":
            return manifest["config"]["model"]
        inputs = manifest.get("inputs", {})
        source = inputs.get("base") or inputs.get("policy")
        if source is None:
            return None
        folder = find_input(folder, source["path"])
    return None


def find_hub_datasets(folder: Path) -> list[str]:
    """Return the ids of the data sets on the Hub that the posts of a data artifact came from."""
    if not (folder / MANIFEST).is_file():
        return []
    sources = list_input_sources(read_manifest(folder).get("inputs", {})).values()
    return sorted({name for source in sources for name in (
        [source["path"]] if source["sha256"] is None else find_hub_datasets(find_input(folder, source["path"])))})
