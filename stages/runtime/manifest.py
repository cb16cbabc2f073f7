"""What a folder of results says of itself: its manifest or, while it is not finished, its order; damage is told.

Nothing here raises for what a crash, a full disk or an editor may have left: each such thing is one line in `problems`.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.runtime.artifact import MANIFEST, PARTIAL, REQUEST, TRACEBACK, ArtifactError

SET_ASIDE = re.compile(r".+\.set-aside-\d+")
KINDS = {"stage": str, "config": dict, "inputs": dict, "metrics": dict, "files": dict, "versions": dict,
         "seconds": int | float, "peak_memory_mib": int | float, "device": str, "commit": str | None}


@dataclass(frozen=True)
class Record:
    """One artifact, finished or begun. `said` is its manifest or order: what `KINDS` names is of its kind or absent."""

    folder: Path
    state: str  # finished, partial, set aside (of another order) or damaged (its manifest cannot be read)
    said: dict
    problems: list[str]


def is_record(folder: Path) -> bool:
    """Whether a stage has made this folder, or begun it."""
    named = any((folder / name).is_file() for name in (MANIFEST, REQUEST))
    return named or (folder.name.endswith(PARTIAL) and folder.is_dir())


def record_of(folder: Path) -> Record:
    """Read what is there; ArtifactError when this is no artifact, nor the beginning of one."""
    if not is_record(folder):
        raise ArtifactError(f"{folder} is no artifact (it has neither {MANIFEST} nor {REQUEST})")
    problems: list[str] = []
    made = read_object(folder / MANIFEST, problems) if (folder / MANIFEST).exists() else None
    said = made if made is not None else read_object(folder / REQUEST, problems) or {}
    for key, kind in KINDS.items():
        if key in said and not isinstance(said[key], kind):
            problems.append(f"{key} is not what a manifest holds there: {said.pop(key)!r}")
    if "stage" not in said and not problems:
        problems.append("it names no stage: was it made by this project?")
    return Record(folder, _state(folder, made), said, [*problems, *_last_error(folder)])


def damaged_files(record: Record) -> list[str]:
    """Files that the manifest lists and that are gone, or of another size (their sha256 is not computed)."""
    found = []
    for name, about in record.said.get("files", {}).items():
        path, stated = record.folder / name, about.get("bytes") if isinstance(about, dict) else None
        if not path.is_file():
            found.append(f"{name} is gone")
        elif path.stat().st_size != stated:
            found.append(f"{name} has {path.stat().st_size} bytes, {MANIFEST} says {stated}")
    return found


def read_object(path: Path, problems: list[str]) -> dict | None:
    """The JSON object in a small file; None, and one more line in `problems`, when there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path.name} cannot be read: {error}")
    else:
        if isinstance(value, dict):
            return value
        problems.append(f"{path.name} holds no JSON object")
    return None


def input_sources(inputs: dict) -> dict[str, dict]:
    """Return the inputs of a manifest as {label: {path, sha256}}; several of one name become NAME[0] or NAME.KEY."""
    sources = {}
    for name, value in inputs.items():
        if isinstance(value, list):
            sources |= {f"{name}[{number}]": source for number, source in enumerate(value)}
        elif isinstance(value, dict) and value and all(isinstance(source, dict) for source in value.values()):
            sources |= {f"{name}.{key}": source for key, source in value.items()}
        else:
            sources[name] = value
    return sources


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """{'lora': {'r': 4}, 'rewards': [{'weight': 1}]} to {'lora.r': 4, 'rewards[0].weight': 1}; other lists stay."""
    if isinstance(value, dict) and value:
        parts = [(f"{name}.{key}" if name else str(key), part) for key, part in value.items()]
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        parts = [(f"{name}[{number}]", part) for number, part in enumerate(value)]
    else:
        return {name: value}
    return {dotted: leaf for inner, part in parts for dotted, leaf in flat(part, inner).items()}


def differing(a: Any, b: Any) -> list[dict]:
    """What differs between two trees of plain values: name, `a` and `b`, of which an absent one is left out."""
    sides = {side: flat(tree) if tree else {} for side, tree in (("a", a), ("b", b))}
    names = dict.fromkeys([*sides["a"], *sides["b"]])
    found = [{"name": name} | {side: leaves[name] for side, leaves in sides.items() if name in leaves}
             for name in names]
    return [row for row in found if len(row) < 3 or row["a"] != row["b"]]


def _state(folder: Path, made: dict | None) -> str:
    if (folder / MANIFEST).exists():
        return "damaged" if made is None else "finished"
    return "set aside" if SET_ASIDE.fullmatch(folder.name) else "partial"


def _last_error(folder: Path) -> list[str]:
    """The end of the traceback that a stage left beside what it had begun."""
    try:
        lines = (folder / TRACEBACK).read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:
        return []
    ended = next((line for line in reversed(lines) if line.strip()), "no reason given")
    return [f"its last try ended: {ended}"]


def headline(metrics: dict) -> list[tuple[str, float]]:
    """The numbers that are shown of an artifact in one line: a stage gives its most telling ones first."""
    return [(key, value) for key, value in metrics.items() if isinstance(value, int | float)][:4]


def leaves(values: dict, prefix: str = "") -> dict[str, object]:
    """Dotted names to values, sections unfolded."""
    found: dict[str, object] = {}
    for name, value in values.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
