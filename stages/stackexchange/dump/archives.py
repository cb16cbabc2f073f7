"""Unpack a table of a dump from a .7z, .gz or .zst to plain XML in scratch space, atomically.

Nothing unpacks to more than the disk can hold. The .7z: seven_zip.py.
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from stages.render.units import format_bytes
from stages.runtime.files import check_free_space
from stages.runtime.progress import Progress
from stages.stackexchange.dump.seven_zip import SCRATCH, SPACE_FACTOR, find_table, find_tables, open_7z, unpack_7z
from stages.stackexchange.dump.xml_table import check_magic

CHUNK_BYTES = 1 << 20
SPACE_CHECK_BYTES = 64 << 20
STREAMS = {".gz": ("gzip", rb"\x1f\x8b"),
           ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")}  # the latter starts a frame to skip


@dataclass(frozen=True)
class Table:
    """One table of a dump, in any of the accepted files."""

    path: str  # file as given: Posts.xml, Posts.xml.gz, Posts.xml.zst, or a .7z that holds it
    name: str  # "Posts" or "Votes"


def unpack_table(table: Table, folder: Path) -> Path:
    """Return the table's plain XML: its own file, or one in `folder`, unpacked now or by a run that was killed.

    Raises ValueError if the file is not what its name says, is damaged or cannot be read, if an archive does not
    contain the table, or if the disk is too full.
    """
    path = Path(table.path)
    if path.suffix.lower() not in UNPACK:
        return path
    with _readable_os_errors(path, f"cannot be unpacked into {folder}"):
        target = folder / f"{table.name}-{_fingerprint(path)}.xml"
        if target.exists():
            return target
        draft = _free_draft(target)
        try:
            UNPACK[path.suffix.lower()](path, table.name, draft)
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    return target


def list_tables(archive: Path, tables: Iterable[str]) -> list[str]:
    """List which of these tables ("Posts", "Votes") a .7z contains; only its header is read.

    Raises ValueError if it lacks the first, has one of them twice, or is not a readable 7z archive.
    """
    required, *others = tables
    with _readable_os_errors(archive, "cannot be read"), open_7z(archive) as opened:
        find_table(opened, archive, required)
        return [required, *(table for table in others if find_tables(opened, archive, table))]


def required_bytes(table: Table) -> int:
    """Return the scratch space in bytes for reading a table; 0 for a .gz or .zst, which does not say its size."""
    path = Path(table.path)
    if path.suffix.lower() == ".7z":
        with _readable_os_errors(path, "cannot be read"), open_7z(path) as opened:
            return SPACE_FACTOR * find_table(opened, path, table.name).uncompressed
    return 0 if path.suffix.lower() in UNPACK else (SPACE_FACTOR - 1) * path.stat().st_size


def _fingerprint(path: Path) -> str:
    """Hash path, size and time of a file, so that an archive that was replaced is unpacked again."""
    stat = path.stat()
    text = f"{path.absolute()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _free_draft(target: Path) -> Path:
    """Return a path for this process's draft; delete the drafts of killed processes, which may fill the disk."""
    for stale in target.parent.glob(f"{target.name}.*.draft"):
        try:
            os.kill(int(stale.suffixes[-2][1:]), 0)
        except (ProcessLookupError, ValueError):
            stale.unlink(missing_ok=True)
        except PermissionError:  # alive, and of another user
            continue
    return target.with_name(f"{target.name}.{os.getpid()}.draft")


@contextmanager
def _readable_os_errors(path: Path, failure: str) -> Iterator[None]:
    """Report missing permissions, a full disk and the like in one line."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {failure}: {error.strerror or error}") from None


def _unpack_stream(path: Path, table: str, target: Path) -> None:
    """Unpack a compressed stream. Its unpacked size is unknown, so the free space is checked on the way."""
    codec, magic = STREAMS[path.suffix.lower()]
    check_magic(path, magic, codec)
    progress, read, written, checked = Progress(f"posts: unpack {path.name}", path.stat().st_size, "bytes"), 0, 0, 0
    with open(path, "rb") as packed, open(target, "wb") as plain:
        for chunk in _chunks(path, packed, codec):
            written += plain.write(chunk)
            if written >= checked + SPACE_CHECK_BYTES:
                checked = written
                check_free_space(f"{path} ({format_bytes(written)} so far)", target.parent,
                                 (SPACE_FACTOR - 1) * written, SCRATCH)
            progress.advance(packed.tell() - read)
            read = packed.tell()
        check_free_space(path, target.parent, (SPACE_FACTOR - 1) * written, SCRATCH)
    progress.finish()


def _chunks(path: Path, packed: BinaryIO, codec: str) -> Iterator[bytes]:
    try:
        with pa.CompressedInputStream(packed, codec) as stream:
            while chunk := stream.read(CHUNK_BYTES):
                yield chunk
    except (OSError, pa.ArrowException) as error:
        if "too much memory" in str(error):
            raise ValueError(f"{path}: packed with a window over 128 MB: unpack it by zstd -d --long=31") from None
        raise ValueError(f"{path}: cut short or damaged ({error}); get it again") from None


UNPACK = {".7z": unpack_7z, ".gz": _unpack_stream, ".zst": _unpack_stream}
