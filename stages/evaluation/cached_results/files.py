"""Keep results in files that are named by the SHA-256 of what they depend on.

A file appears by one rename, complete or not at all, begins with the SHA-256 of its content, and never changes. Two
stages may read and write the same folder at once. It can be deleted at any time: what it held is computed again.
"""

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path

from stages.runtime.files import atomic_path
from stages.runtime.stage_lines import print_line

SUFFIX = ".result"
MAX_BYTES = 2 << 30
MAX_DRAFT_SECONDS = 24 * 3600.0  # then a draft is of a killed process


def digest_value(value: object) -> str:
    """Compute the SHA-256 of a value that JSON can express, as hexadecimal text."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


class ResultFiles:
    """Results in one folder, as bytes. depends_on: a value that JSON can express."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, depends_on: dict) -> bytes | None:
        """Read a result; None if there is none. A damaged file is deleted, after one line."""
        path = self._path(depends_on)
        try:
            content = path.read_bytes()
        except OSError:
            return None
        size = hashlib.sha256().digest_size
        if hashlib.sha256(content[size:]).digest() != content[:size]:
            print_line(f"{path} is damaged and is deleted: its result is computed again")
            with suppress(OSError):
                path.unlink(missing_ok=True)
            return None
        with suppress(OSError):
            os.utime(path)  # the least recently used are deleted first
        return content[size:]

    def write(self, depends_on: dict, data: bytes) -> None:
        """Write a result. A full or read-only disk costs the file alone, after one line."""
        path = self._path(depends_on)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(path, sync=True) as draft, open(draft, "wb") as stream:
                stream.write(hashlib.sha256(data).digest())
                stream.write(data)
        except OSError as error:
            print_line(f"a result is not stored for later evaluations, in {self.folder}: {error}")

    def delete_excess(self, max_bytes: int = MAX_BYTES) -> None:
        """Delete the least recently used results beyond `max_bytes`, and the drafts of killed processes."""
        states = []
        with suppress(OSError):
            for path in self.folder.iterdir():
                with suppress(OSError):  # another process may delete it
                    states.append((path.stat().st_mtime, path.stat().st_size, path))
        total = sum(size for _, size, path in states if path.suffix == SUFFIX)
        for used, size, path in sorted(states):
            is_excess = path.suffix == SUFFIX and total > max_bytes
            if is_excess or (path.suffix == ".tmp" and time.time() - used > MAX_DRAFT_SECONDS):
                with suppress(OSError):
                    path.unlink()
            total -= size if is_excess else 0

    def _path(self, depends_on: dict) -> Path:
        return self.folder / f"{digest_value(depends_on)}{SUFFIX}"
