"""Write what py7zr unpacks: one table to one file, no longer than the archive's header says; the others nowhere."""

import re
from io import BufferedWriter, FileIO
from pathlib import Path

from py7zr.exceptions import ArchiveError
from py7zr.io import NullIO, Py7zIO, WriterFactory

from stages.runtime.progress import Progress


class OneFileFactory(WriterFactory):
    """Write TABLE.xml to one file, whatever its name in the archive, and count the bytes of the others."""

    def __init__(self, table: str, target: Path, size: int, progress: Progress):
        self.name, self.progress = f"{table}.xml".lower(), progress
        self.file = BoundedFile(target, size, progress)

    def create(self, filename: str) -> Py7zIO:
        """Return the writer of a member of the archive."""
        return self.file if re.split(r"[/\\]", filename)[-1].lower() == self.name else _Discard(self.progress)


class _Discard(NullIO):
    """Count bytes as progress, and forget them."""

    def __init__(self, progress: Progress):
        super().__init__()
        self.progress = progress

    def write(self, data: bytes | bytearray) -> int:
        self.progress.advance(len(data))
        return len(data)

    def size(self) -> int:
        return 0


class BoundedFile(BufferedWriter, Py7zIO):
    """A file that must not grow beyond the size in the archive's header. py7zr closes it."""

    def __init__(self, target: Path, limit: int, progress: Progress):
        super().__init__(FileIO(target, "w"))
        self.remaining, self.progress = limit, progress

    def write(self, data: bytes | bytearray) -> int:
        """Write, and count as progress; ArchiveError, with nothing written, beyond the size."""
        self.remaining -= len(data)
        if self.remaining < 0:
            raise ArchiveError("unpacks to more than it states")
        self.progress.advance(len(data))
        return super().write(data)

    def size(self) -> int:
        """Return the bytes written so far."""
        return self.tell()
