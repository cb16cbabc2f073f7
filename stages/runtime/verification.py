"""Verify that the files of an artifact are those that its stage published: sizes and SHA-256 against the manifest.

Hashing takes a second a gigabyte, and every stage reads what the stages before it made. So a file is hashed again only
when its size, times or inode have changed since it was last verified; these are remembered in a file beside the logs.
"""

import json
from pathlib import Path

from stages.runtime.artifact import MANIFEST, ArtifactError, hash_files
from stages.runtime.files import write_json
from stages.runtime.manifest import find_damaged_files, read_record

VERIFIED = "verified.json"  # in the run's logs/


def verify_artifacts(folders: list[Path], logs: Path, *, always: bool = False) -> None:
    """Check the files of each folder that is an artifact; ArtifactError names the first that is damaged.

    Args:
        logs: folder of the file that remembers what was verified.
        always: hash every file, changed or not.
    """
    verified = {} if always else _read_verified(logs / VERIFIED)
    changed = False
    for folder in folders:
        if (folder / MANIFEST).is_file():
            changed |= _verify(folder, verified)
    if changed:
        logs.mkdir(parents=True, exist_ok=True)
        write_json(logs / VERIFIED, verified)


def list_damage(folder: Path) -> list[str]:
    """List what is wrong with a finished artifact, a line each; every file is hashed."""
    record = read_record(folder)
    if record.state != "finished" or not isinstance(record.manifest.get("files"), dict):
        return record.problems or [f"{MANIFEST} lists no files"]
    return [*record.problems, *find_damaged_files(record), *_find_changed(folder, record.manifest["files"], {})]


def _verify(folder: Path, verified: dict) -> bool:
    """Check one artifact and add its files to `verified`; return whether any file was hashed."""
    record = read_record(folder)
    if not isinstance(record.manifest.get("files"), dict):
        raise ArtifactError(_describe(folder, (record.problems or [f"{MANIFEST} lists no files"])[0]))
    before = dict(verified)
    if problems := find_damaged_files(record) or _find_changed(folder, record.manifest["files"], verified):
        raise ArtifactError(_describe(folder, problems[0]))
    return verified != before


def _find_changed(folder: Path, files: dict[str, dict], verified: dict) -> list[str]:
    """List files whose SHA-256 is not the manifest's, and add the others to `verified`."""
    states = {folder / name: [*_state(folder / name), entry["sha256"]] for name, entry in files.items()
              if (folder / name).is_file()}
    unknown = [path for path, state in states.items() if verified.get(str(path.resolve())) != state]
    damaged = []
    for path, sha256 in hash_files(unknown):
        if sha256 == states[path][-1]:
            verified[str(path.resolve())] = states[path]
        else:
            damaged.append(f"{path.relative_to(folder)} is not what was published: its SHA-256 differs")
    return damaged


def _describe(folder: Path, problem: str) -> str:
    return f"{folder} is damaged: {problem}. Restore it, or delete {folder} and run its stage again"


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]


def _read_verified(path: Path) -> dict:
    try:
        verified = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return verified if isinstance(verified, dict) else {}
