"""Find what a model comes from, for its card: the pretrained model, the sites and licences, data sets on the Hub."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from stages.artifacts.artifact import read_manifest
from stages.artifacts.finished import MANIFEST
from stages.artifacts.lineage import find_input
from stages.artifacts.manifest import list_input_sources
from stages.model_files.provenance import Provenance, read_provenance


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
