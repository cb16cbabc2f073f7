"""Read the manifest of an artifact or, while it is unfinished, its request; verify its files, and compare manifests.

Hashing takes a second a gigabyte, and every stage reads what the stages before it made. So a file is hashed again only
when its size, times or inode have changed since it was last verified; these are remembered in a file beside the logs.

Reading raises nothing for what a crash, a full disk or an editor may leave: each such problem is one line of text.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stages.artifacts.artifact import MANIFEST, OLD, PARTIAL, REQUEST, TRACEBACK, ArtifactError, find_damaged_files
from stages.runtime.files import hash_files, read_json_object, read_last_lines, write_json

VERIFIED = "verified.json"  # in the run's logs/
SET_ASIDE = re.compile(r".+\.set-aside-\d+")
TYPES = {"stage": str, "config": dict, "inputs": dict, "metrics": dict, "files": dict, "versions": dict,
         "seconds": int | float, "peak_memory_mib": int | float, "device": str, "cpu_kernels": str,
         "commit": str | None}
HEADLINE_METRICS = 4


@dataclass(frozen=True)
class Record:
    """An artifact, finished or not.

    manifest: or the request, of an unfinished artifact. Each key of `TYPES` is absent or has that type.
    """

    folder: Path
    state: str  # finished, replaced (in .old/), partial, set aside (of another request), damaged
    manifest: dict
    problems: list[str]


def is_artifact(folder: Path) -> bool:
    """Check whether a stage has built this folder, or started to."""
    has_file = (folder / MANIFEST).is_file() or (folder / REQUEST).is_file()
    return has_file or (folder.name.endswith(PARTIAL) and folder.is_dir())


def read_record(folder: Path) -> Record:
    """Read an artifact's manifest or request; ArtifactError if the folder is not an artifact."""
    if not is_artifact(folder):
        raise ArtifactError(f"{folder} is no artifact (it has neither {MANIFEST} nor {REQUEST})")
    problems: list[str] = []
    finished = (folder / MANIFEST).exists()
    manifest = read_json_object(folder / MANIFEST, problems) if finished else None
    state = _state(folder, finished, manifest is not None)
    if manifest is None:
        manifest = read_json_object(folder / REQUEST, problems) or {}
    for key, kind in TYPES.items():
        if key in manifest and not isinstance(manifest[key], kind):
            problems.append(f"{key} has the wrong type for a manifest: {manifest.pop(key)!r}")
    if "stage" not in manifest and not problems:
        problems.append("it names no stage: was it made by this project?")
    return Record(folder, state, manifest, [*problems, *_last_error(folder)])


def list_input_sources(inputs: dict) -> dict[str, dict]:
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


def flatten_tree(value: Any, name: str = "", *, lists: bool = True) -> dict[str, Any]:
    """Flatten nested mappings: {'lora': {'r': 4}, 'rewards': [{'weight': 1}]} to {'lora.r': 4, 'rewards[0].weight': 1}.

    Args:
        lists: flatten lists of mappings, too; other lists are always values.
    """
    if isinstance(value, dict) and (value or not name):
        children = [(f"{name}.{key}" if name else str(key), child) for key, child in value.items()]
    elif lists and isinstance(value, list) and any(isinstance(child, dict) for child in value):
        children = [(f"{name}[{number}]", child) for number, child in enumerate(value)]
    else:
        return {name: value}
    return {key: leaf for inner, child in children for key, leaf in flatten_tree(child, inner, lists=lists).items()}


def diff_trees(a: Any, b: Any) -> list[dict]:
    """List the values that differ between two trees as {name, a, b}, without `a` or `b` where it is absent."""
    sides = {side: flatten_tree(tree) if tree else {} for side, tree in (("a", a), ("b", b))}
    names = dict.fromkeys([*sides["a"], *sides["b"]])
    rows = [{"name": name} | {side: leaves[name] for side, leaves in sides.items() if name in leaves} for name in names]
    return [row for row in rows if len(row) < 3 or row["a"] != row["b"]]


def headline_metrics(metrics: dict) -> list[tuple[str, float]]:
    """Select the numbers for a one-line summary: the first ones, a stage returns the most important first."""
    return [(key, value) for key, value in metrics.items() if isinstance(value, int | float)][:HEADLINE_METRICS]


def _state(folder: Path, finished: bool, readable: bool) -> str:
    if finished and readable and folder.parent.name == OLD:
        return "replaced"
    if finished:
        return "finished" if readable else "damaged"
    return "set aside" if SET_ASIDE.fullmatch(folder.name) else "partial"


def _last_error(folder: Path) -> list[str]:
    """Return the last line of the traceback that a failed stage left."""
    if not (folder / TRACEBACK).is_file():
        return []
    last_line = next(reversed(read_last_lines(folder / TRACEBACK)), "no reason given")
    return [f"its last attempt failed: {last_line}"]


def verify_artifacts(folders: list[Path], logs: Path, *, always: bool = False) -> None:
    """Check the files of each folder that is an artifact; ArtifactError names the first that is damaged.

    Args:
        logs: folder of the file that remembers what was verified.
        always: hash every file, changed or not.
    """
    verified = {} if always else read_json_object(logs / VERIFIED) or {}
    before = dict(verified)
    for folder in folders:
        if (folder / MANIFEST).is_file() and (problems := _list_problems(read_record(folder), verified)):
            raise ArtifactError(f"{folder} is damaged: {problems[0]}. Restore it, or delete {folder} and run its stage "
                                f"again")
    if verified != before:
        logs.mkdir(parents=True, exist_ok=True)
        write_json(logs / VERIFIED, verified)


def list_damage(folder: Path) -> list[str]:
    """List what is wrong with a finished artifact, a line each; every file is hashed."""
    record = read_record(folder)
    return list(dict.fromkeys([*record.problems, *_list_problems(record, {})]))


def _list_problems(record: Record, verified: dict) -> list[str]:
    """List what differs from the manifest, and add the files that do not to `verified`."""
    files = record.manifest.get("files")
    if not isinstance(files, dict):
        return record.problems or [f"{MANIFEST} lists no files"]
    return [*find_damaged_files(record.folder, files), *_find_changed(record.folder, files, verified)]


def _find_changed(folder: Path, files: dict[str, dict], verified: dict) -> list[str]:
    """List files whose SHA-256 is not the manifest's, and add the others to `verified`."""
    states = {folder / name: [*_file_state(folder / name), entry["sha256"]] for name, entry in files.items()
              if (folder / name).is_file()}
    unknown = [path for path, state in states.items() if verified.get(str(path.resolve())) != state]
    damaged = []
    for path, sha256 in hash_files(unknown):
        if sha256 == states[path][-1]:
            verified[str(path.resolve())] = states[path]
        else:
            damaged.append(f"{path.relative_to(folder)} is not what was published: its SHA-256 differs")
    return damaged


def _file_state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
