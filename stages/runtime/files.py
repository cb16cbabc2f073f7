"""Write files atomically, hash them, link them, and format their sizes.

Every file that a reader may open while it is written, or that a killed process may leave behind, goes through
`atomic_path`.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from stages.render.units import format_bytes

PARTIAL = ".partial"  # end of the name of the folder of an unfinished artifact
HASHING_THREADS = 4
TAIL_BYTES = 256 << 10
DIGEST_CHARACTERS = 12  # of a SHA-256, where it is abbreviated


@contextmanager
def atomic_path(path: Path, *, sync: bool = False) -> Iterator[Path]:
    """Yield a draft path in the same folder, and rename it to `path` if the block succeeds.

    The draft's name holds the process id, so that two processes may write the same file; it is deleted on an error.

    Args:
        sync: flush file and folder to the disk, so that the file also survives a power failure.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield draft
        if sync:
            sync_to_disk(draft)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)
    if sync:
        sync_to_disk(path.parent)


def sync_to_disk(path: Path) -> None:
    """Flush a file or a folder. After a power failure, a rename may otherwise have outrun the data it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, as UTF-8."""
    with atomic_path(path) as draft:
        draft.write_text(text, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    """Write a value atomically as indented JSON; types that JSON lacks become text."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n")


def read_json_object(path: Path, problems: list[str] | None = None) -> dict | None:
    """Read the JSON object in a file; None if there is no such file, with the reason as a line in `problems`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(value, dict):
            return value
        problem = "holds no JSON object"
    except FileNotFoundError:
        problem = "is missing"
    except (OSError, ValueError, RecursionError) as error:
        problem = f"cannot be read: {error}"
    if problems is not None:
        problems.append(f"{path.name} {problem}")
    return None


def read_last_lines(path: Path, start: int = 0, errors: str = "replace") -> list[str]:
    """Read the whole lines within the last TAIL_BYTES of a text file, without empty ones; none if it cannot be read.

    start: of the first byte that counts; a shorter file has been written anew, and all of it counts. errors: what
    bytes that are not UTF-8 become, as in bytes.decode.
    """
    try:
        with open(path, "rb") as stream:
            size = stream.seek(0, 2)
            start = start if start <= size else 0
            begin = stream.seek(max(start, size - TAIL_BYTES))
            lines = stream.read().decode("utf-8", errors).split("\n")[1 if begin > start else 0:]
    except OSError:
        return []
    return [line.rstrip() for line in lines if line.strip()]


def list_files(path: Path) -> list[Path]:
    """List the files below a folder, sorted; of a file, itself."""
    return sorted(file for file in (path, *path.rglob("*")) if file.is_file())


def is_on_device(file: Path, folder: Path) -> bool:
    """Check whether a file (of a link: what it leads to) is on the file system of a folder."""
    return file.stat().st_dev == folder.stat().st_dev


def link_or_copy(source: Path, target: Path) -> None:
    """Hard-link `source` to `target`, replacing it; copy where the file system has no hard links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        with atomic_path(target) as draft:
            shutil.copyfile(source, draft)


def hash_file(path: Path) -> str:
    """Compute the SHA-256 of a file, as hexadecimal text."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def hash_files(files: list[Path], hash_one: Callable[[Path], str] = hash_file) -> list[tuple[Path, str]]:
    """Hash files in several threads: one core is the limit for many gigabytes."""
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        return list(zip(files, threads.map(hash_one, files), strict=True))


def hash_input(path: Path) -> str:
    """Compute the SHA-256 of a file of a dump, which may be large: a process reads it again only if it has changed."""
    status = path.stat()
    return _hash_state(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


@cache
def _hash_state(path: Path, *_: int) -> str:
    return hash_file(path)


def check_free_space(name: str | Path, folder: Path, required_bytes: float, kind: str = "disk space") -> None:
    """Raise ValueError if fewer than `required_bytes` are free on the disk of `folder`, which need not exist.

    Args:
        name: what the space is for.
        kind: of space, for the message.
    """
    free_bytes = shutil.disk_usage(nearest_folder(folder)).free
    if free_bytes < required_bytes:
        raise ValueError(f"{name}: needs {format_bytes(required_bytes)} of {kind} under {folder}, where "
                         f"{format_bytes(free_bytes)} are free: make room, and the same command continues")


def nearest_folder(path: Path) -> Path:
    """Return the folder itself, or else the nearest one above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.is_dir())


def used_bytes(*paths: Path) -> int:
    """Sum the sizes of files and of the files in folders; what does not exist has none."""
    return sum(file.stat().st_size for path in paths for file in list_files(path))
