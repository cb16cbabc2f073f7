"""Verify that the files of an artifact are those that its stage published: sizes and SHA-256 against the manifest.

Hashing takes a second a gigabyte, and every stage reads what the stages before it made. So a file is hashed again only
when its size, times or inode have changed since it was last verified; these are remembered in a file beside the logs.
"""

from pathlib import Path

from stages.artifacts.artifact import MANIFEST, ArtifactError
from stages.artifacts.manifest import Record, find_damaged_files, read_record
from stages.runtime.files import hash_files, read_json_object, write_json

VERIFIED = "verified.json"  # in the run's logs/


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
    return [*find_damaged_files(record), *_find_changed(record.folder, files, verified)]


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


def _state(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
