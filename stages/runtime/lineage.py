"""Where an artifact comes from, and whether that is still what lies there: inputs, ancestry, staleness.

A manifest names each input by its path and by the sha256 of the input's own manifest, so that one comparison of a small
file vouches for a whole ancestry. Paths in it are relative to the folder that the stage was started in.
"""

import os
from dataclasses import asdict, dataclass
from pathlib import Path

import yaml

from stages.recipe.recipe import Recipe
from stages.recipe.schema import logging_only
from stages.runtime.artifact import MANIFEST, ArtifactError, digest, folder_of
from stages.runtime.manifest import Record, differing, input_sources, is_record, record_of

RECIPE = "recipe.yaml"
SECTIONS = {"gather": "pairs"}  # stage: section of the recipe, where their names differ
HASHED_BYTES = 256 << 20  # an input larger than that (a dump) is not read through to see whether it is the same
BROKEN = ("changed", "gone", "not finished", "cannot be read")


@dataclass(frozen=True)
class Link:
    """One input of an artifact: as its manifest names it, and what has become of that."""

    name: str
    path: str
    sha256: str | None  # None: it came from a hub
    verdict: str  # same, not checked (why), or one of BROKEN


def links(record: Record) -> list[Link]:
    """Every input; a list or a mapping of sources gives one link each."""
    found = []
    for label, source in input_sources(record.said.get("inputs", {})).items():
        source = source if isinstance(source, dict) else {}
        path, sha256 = str(source.get("path", "?")), source.get("sha256")
        sha256 = None if sha256 is None else str(sha256)
        found.append(Link(label, path, sha256, _verdict(place_of(record.folder, path), sha256)))
    return found


def place_of(artifact: Path, path: str) -> Path:
    """Where an input lies: looked for from the folders around the artifact, nearest first, then from here."""
    around = Path(os.path.abspath(artifact)).parents
    return next((place for root in around if os.path.exists(place := root / folder_of(path))), folder_of(path))


def ancestry(record: Record, seen: set[Path] | None = None) -> list[dict]:
    """The inputs, each with its own `inputs` up to the dump; one that stands further up already is `repeated`.

    Nothing follows a broken link: what lies there now is not what this was made from.
    """
    seen, found = set() if seen is None else seen, []
    for link in links(record):
        place = place_of(record.folder, link.path)
        whole = link.verdict not in BROKEN
        node = asdict(link) | {"broken": not whole, "repeated": whole and place.resolve() in seen, "inputs": []}
        if whole and not node["repeated"] and is_record(place):
            seen.add(place.resolve())
            node["inputs"] = ancestry(record_of(place), seen)
        found.append(node)
    return found


def stale(record: Record) -> list[str]:
    """Why the artifact is not what its stage would make now, a line a reason; none when it is."""
    reasons = [f"its input {link.name}, {link.path}, {_has(link.verdict)}"
               for link in links(record) if link.verdict in BROKEN]
    return reasons + _other_settings(record)


def run_of(artifact: Path) -> Path | None:
    """The folder of the run that an artifact belongs to, where its recipe is (a share of pairs lies one deeper)."""
    around = (Path(os.path.normpath(artifact / up)) for up in ("..", "../.."))
    return next((folder for folder in around if (folder / RECIPE).is_file()), None)


def read_recipe(path: Path) -> dict:
    """The mapping in a run's recipe.yaml; ArtifactError when there is none in it."""
    try:
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ArtifactError(f"{path} cannot be read: {error}") from None
    if not isinstance(recipe, dict):
        raise ArtifactError(f"{path} is no recipe")
    return recipe


def section_of(stage: str) -> str:
    """The recipe's section that a stage takes its settings from."""
    return SECTIONS.get(stage, stage)


def _verdict(place: Path, sha256: str | None) -> str:
    if sha256 is None:
        return "not checked (from a hub)"
    if not os.path.exists(place):  # unlike Path's, it bears a name that no file system takes
        return "gone"
    try:
        if not is_record(place) and (size := _bytes_of(place)) > HASHED_BYTES:
            return f"not checked ({size / 1e9:.1f} GB)"
        return "same" if digest(place) == sha256 else "changed"
    except ArtifactError:
        return "not finished"
    except OSError:
        return "cannot be read"


def _bytes_of(place: Path) -> int:
    files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _has(verdict: str) -> str:
    return {"changed": "has changed", "gone": "is gone", "not finished": f"has no {MANIFEST}"}.get(verdict, verdict)


def _other_settings(record: Record) -> list[str]:
    run, section = run_of(record.folder), section_of(record.said.get("stage", ""))
    if run is None or "config" not in record.said:
        return []
    try:
        wanted = read_recipe(run / RECIPE).get(section)
    except ArtifactError as error:
        return [str(error)]
    if not isinstance(wanted, dict):
        return []
    rows = differing(record.said["config"], {name: value for name, value in wanted.items()
                                             if name not in logging_only(getattr(Recipe(), section, None))})
    return [f"{section}.{row['name']} is {row.get('a', 'absent')!r}, {RECIPE} says {row.get('b', 'absent')!r}"
            for row in rows]
