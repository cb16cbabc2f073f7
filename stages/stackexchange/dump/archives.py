"""Unpack a table of a dump from a .7z, .gz or .zst to plain XML in scratch space, atomically.

Names inside an archive never become paths, and nothing unpacks to more than its header states or the disk can hold.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import py7zr
import pyarrow as pa
from py7zr.exceptions import PasswordRequired, UnsupportedCompressionMethodError

from stages.render.units import format_bytes
from stages.runtime.disk_space import check_free_space
from stages.runtime.progress import Progress
from stages.runtime.stage_lines import print_line
from stages.stackexchange.dump.archive_writers import OneFileFactory
from stages.stackexchange.dump.unpacking_cost import PLAIN_NAME, describe_cost, list_files_before
from stages.stackexchange.dump.xml_table import LOOKS

SPACE_FACTOR = 3  # the file, its rows again in sorted runs, and the result
SCRATCH = "scratch space"
CHUNK_BYTES = 1 << 20
SPACE_CHECK_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
STREAMS = {".gz": ("gzip", rb"\x1f\x8b"),
           ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")}  # the latter starts a frame to skip
MORE_LOOKS = ((rb"Rar!", "a rar archive"), (rb"<\?xml|<posts|<votes", "plain XML (name it .xml)"))


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
    with _readable_os_errors(archive, "cannot be read"), _open(archive) as opened:
        files = _list_files(opened, archive)
        _find_table(files, archive, required)
        return [required, *(table for table in others if _find_tables(files, archive, table))]


def required_bytes(table: Table) -> int:
    """Return the scratch space in bytes for reading a table; 0 for a .gz or .zst, which does not say its size."""
    path = Path(table.path)
    if path.suffix.lower() == ".7z":
        with _readable_os_errors(path, "cannot be read"), _open(path) as opened:
            return SPACE_FACTOR * _find_table(_list_files(opened, path), path, table.name).uncompressed
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


def _check_magic(path: Path, magic: bytes, expected: str) -> None:
    """Raise ValueError unless the file starts with this pattern: it may be a web page or zip archive in disguise."""
    with open(path, "rb") as stream:
        head = stream.read(CHUNK_BYTES)
    if re.match(magic, head):
        return
    text = head.removeprefix(BOM).lstrip()
    looks = next((f"it looks like {kind}" for pattern, kind in LOOKS + MORE_LOOKS if re.match(pattern, text)), None)
    looks = looks or ("it is something else" if head else "it is empty")
    raise ValueError(f"{path}: not {expected}: {looks}; get the right file, or give it its right name")


def _unpack_7z(archive: Path, table: str, target: Path) -> None:
    with _open(archive) as opened:
        member = _find_table(_list_files(opened, archive), archive, table)
        needed_bytes, free_bytes = SPACE_FACTOR * member.uncompressed, shutil.disk_usage(target.parent).free
        check_free_space(archive, target.parent, needed_bytes, SCRATCH)
        if line := describe_cost(opened, archive, member.filename, member.uncompressed, needed_bytes, free_bytes):
            print_line(line)
        before = {name: size for name, size in list_files_before(opened, member.filename).items()
                  if PLAIN_NAME.fullmatch(name)}  # other names are decoded, too, without a sign of progress
        progress = Progress(f"posts: unpack {table}.xml of {archive.name}", sum(before.values()) + member.uncompressed,
                            "bytes")
        with _py7zr_errors(archive):
            opened.extract(targets=[*before, member.filename],
                           factory=OneFileFactory(table, target, member.uncompressed, progress))
    progress.finish()
    if not target.is_file() or target.stat().st_size != member.uncompressed:
        raise ValueError(f"{archive}: damaged: {table}.xml does not unpack to the size that the archive states; "
                         f"get it again")


@contextmanager
def _open(archive: Path) -> Iterator[py7zr.SevenZipFile]:
    _check_magic(archive, rb"7z\xbc\xaf\x27\x1c", "a 7z archive")
    with _py7zr_errors(archive):
        opened = py7zr.SevenZipFile(archive)
    with opened:
        if opened.needs_password():
            raise _password_error(archive)
        yield opened


def _list_files(opened: py7zr.SevenZipFile, archive: Path) -> list:
    with _py7zr_errors(archive):
        return [file for file in opened.list() if not file.is_directory]


def _find_table(files: list, archive: Path, table: str):
    """Return the one file called TABLE.xml, in any letter case and any folder of the archive."""
    matches = _find_tables(files, archive, table)
    if not matches:
        raise ValueError(f"{archive}: holds no {table}.xml, but {_format_names(files) or 'nothing'}; expected the "
                         f"archive of a site, or of one of its tables SITE-Posts.7z and SITE-Votes.7z")
    return matches[0]


def _find_tables(files: list, archive: Path, table: str) -> list:
    """Return no or one file. Raises ValueError if there are more."""
    matches = [file for file in files if re.split(r"[/\\]", file.filename)[-1].lower() == f"{table}.xml".lower()]
    if len(matches) > 1:
        raise ValueError(f"{archive}: holds {_format_names(matches)}; expected those of one site: unpack it, give its "
                         f"folders")
    return matches


def _format_names(files: list) -> str:
    return ", ".join(repr(file.filename)[1:-1] for file in files[:8])  # repr: the names are untrusted


def _password_error(archive: Path) -> ValueError:
    return ValueError(f"{archive}: needs a password, which the archive of a dump does not; unpack it, give its folder")


@contextmanager
def _py7zr_errors(archive: Path) -> Iterator[None]:
    """Convert the errors of py7zr, and of the dozen decoders that it calls, to ValueError."""
    try:
        yield
    except PasswordRequired:
        raise _password_error(archive) from None
    except UnsupportedCompressionMethodError:
        raise ValueError(f"{archive}: packed in a way that is not known here: unpack it, give its folder") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # from the system; a decoder's OSError has no number
            raise
        raise ValueError(f"{archive}: cut short or damaged ({type(error).__name__}); get it again") from None


def _unpack_stream(path: Path, table: str, target: Path) -> None:
    """Unpack a compressed stream. Its unpacked size is unknown, so the free space is checked on the way."""
    codec, magic = STREAMS[path.suffix.lower()]
    _check_magic(path, magic, codec)
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


UNPACK = {".7z": _unpack_7z, ".gz": _unpack_stream, ".zst": _unpack_stream}
