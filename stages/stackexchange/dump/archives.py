"""A table of a dump to plain XML on scratch space: out of a .7z, a .gz or a .zst; whole, or not at all.

Names inside an archive never become paths, and nothing unpacks to more than its header states or the disk can hold.
"""

import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedWriter, FileIO
from pathlib import Path
from typing import BinaryIO

import py7zr
import pyarrow as pa
from py7zr.exceptions import ArchiveError, PasswordRequired, UnsupportedCompressionMethodError
from py7zr.io import Py7zIO, WriterFactory

from stages.render.units import format_bytes
from stages.runtime.progress import Progress
from stages.stackexchange.dump.xml_table import LOOKS

SPACE_FACTOR = 3  # the file, and its rows once more in runs, and the result
CHUNK_BYTES = 1 << 20
LOOK_AT_DISK_EVERY_BYTES = 64 << 20
BOM = b"\xef\xbb\xbf"
STREAMS = {".gz": ("gzip", rb"\x1f\x8b"),
           ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")}  # the latter begins a frame to be skipped
LOOKS_TOO = ((rb"Rar!", "a rar archive"), (rb"<\?xml|<posts|<votes", "plain XML (name it .xml)"))


@dataclass(frozen=True)
class Table:
    """One table of a dump, wherever it lies."""

    path: str  # file as given: Posts.xml, Posts.xml.gz, Posts.xml.zst, or a .7z that holds it
    name: str  # "Posts" or "Votes"


def unpacked(table: Table, folder: Path) -> Path:
    """The table's plain XML: its own file, or one in `folder` that is unpacked now, or was by a run that was killed.

    Raises ValueError when the file is not what its name says, is damaged or cannot be read, when an archive does not
    hold the table, and when the disk is too full.
    """
    path = Path(table.path)
    if path.suffix.lower() not in UNPACK:
        return path
    with _one_line(path, f"cannot be unpacked into {folder}"):
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


def tables_in(archive: Path, tables: Iterable[str]) -> list[str]:
    """Which of these tables ("Posts", "Votes") a .7z holds; only its header is read. The first is a must.

    Raises ValueError when it does not hold the first, or one of them twice, and when it is no readable 7z archive.
    """
    needed, *others = tables
    with _one_line(archive, "cannot be read"), _opened(archive) as opened:
        files = _files(opened, archive)
        _member(files, archive, needed)
        return [needed, *(table for table in others if _named(files, archive, table))]


def check_space(name: str | Path, folder: Path, needed: float) -> None:
    """ValueError when fewer than `needed` bytes are free in `folder`; `name` says what they are for."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ValueError(f"{name}: needs {format_bytes(needed)} of scratch space under {folder}, where "
                         f"{format_bytes(free)} are free")


def _fingerprint(path: Path) -> str:
    """Of a place and what lies there now: an archive that was replaced is unpacked again."""
    stat = path.stat()
    said = f"{path.absolute()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return hashlib.sha256(said.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _free_draft(target: Path) -> Path:
    """Where this process may write; drafts that killed processes left are removed, as they may fill the disk."""
    for left in target.parent.glob(f"{target.name}.*.draft"):
        try:
            os.kill(int(left.suffixes[-2][1:]), 0)
        except (ProcessLookupError, ValueError):
            left.unlink(missing_ok=True)
        except PermissionError:  # alive, and someone else's
            continue
    return target.with_name(f"{target.name}.{os.getpid()}.draft")


@contextmanager
def _one_line(path: Path, what: str) -> Iterator[None]:
    """No permission, no space, a broken disk: one line for people."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: {what}: {error.strerror or error}") from None


def _check_magic(path: Path, magic: bytes, expected: str) -> None:
    """ValueError unless the file begins with this pattern, as a web page or a zip archive by another name does not."""
    with open(path, "rb") as stream:
        head = stream.read(CHUNK_BYTES)
    if re.match(magic, head):
        return
    text = head.removeprefix(BOM).lstrip()
    looks = next((f"it looks like {what}" for pattern, what in LOOKS + LOOKS_TOO if re.match(pattern, text)), None)
    looks = looks or ("it is something else" if head else "it is empty")
    raise ValueError(f"{path}: not {expected}: {looks}; get the right file, or give it its right name")


def _unpack_7z(archive: Path, table: str, target: Path) -> None:
    with _opened(archive) as opened:
        member = _member(_files(opened, archive), archive, table)
        check_space(archive, target.parent, SPACE_FACTOR * member.uncompressed)
        progress = Progress(f"unpack {table}.xml of {archive.name}", member.uncompressed, "bytes")
        with _py7zr(archive):
            opened.extract(targets=[member.filename], factory=_To(target, member.uncompressed, progress))
    progress.finish()
    if not target.is_file() or target.stat().st_size != member.uncompressed:
        raise ValueError(f"{archive}: damaged: {table}.xml does not unpack to the size that the archive states; "
                         f"get it again")


@contextmanager
def _opened(archive: Path) -> Iterator[py7zr.SevenZipFile]:
    _check_magic(archive, rb"7z\xbc\xaf\x27\x1c", "a 7z archive")
    with _py7zr(archive):
        opened = py7zr.SevenZipFile(archive)
    with opened:
        if opened.needs_password():
            raise _locked(archive)
        yield opened


def _files(opened: py7zr.SevenZipFile, archive: Path) -> list:
    with _py7zr(archive):
        return [file for file in opened.list() if not file.is_directory]


def _member(files: list, archive: Path, table: str):
    """The one file called TABLE.xml, in any letter case and in any folder of the archive."""
    found = _named(files, archive, table)
    if not found:
        raise ValueError(f"{archive}: holds no {table}.xml, but {_shown(files) or 'nothing'}; expected the archive of "
                         f"a site, or of one of its tables SITE-Posts.7z and SITE-Votes.7z")
    return found[0]


def _named(files: list, archive: Path, table: str) -> list:
    """None or one file. ValueError when there are more."""
    found = [file for file in files if re.split(r"[/\\]", file.filename)[-1].lower() == f"{table}.xml".lower()]
    if len(found) > 1:
        raise ValueError(f"{archive}: holds {_shown(found)}; expected those of one site: unpack it, give its folders")
    return found


def _shown(files: list) -> str:
    return ", ".join(repr(file.filename)[1:-1] for file in files[:8])  # whoever packed it chose these names


def _locked(archive: Path) -> ValueError:
    return ValueError(f"{archive}: needs a password, which the archive of a dump does not; unpack it, give its folder")


@contextmanager
def _py7zr(archive: Path) -> Iterator[None]:
    """Around calls of the library and nothing else: its errors, and those of a dozen decoders below it, in one line."""
    try:
        yield
    except PasswordRequired:
        raise _locked(archive) from None
    except UnsupportedCompressionMethodError:
        raise ValueError(f"{archive}: packed in a way that is not known here: unpack it, give its folder") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # of the system; a decoder's OSError has no number
            raise
        raise ValueError(f"{archive}: cut short or damaged ({type(error).__name__}); get it again") from None


class _To(WriterFactory):
    """Hands out one file of our own naming."""

    def __init__(self, target: Path, size: int, progress: Progress):
        self.file = _File(target, size, progress)

    def create(self, filename: str) -> Py7zIO:
        return self.file


class _File(BufferedWriter, Py7zIO):
    """A file that refuses to grow over what the archive's header states. py7zr closes it."""

    def __init__(self, target: Path, limit: int, progress: Progress):
        super().__init__(FileIO(target, "w"))
        self.left, self.progress = limit, progress

    def write(self, data: bytes | bytearray) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise ArchiveError("unpacks to more than it states")
        self.progress.advance(len(data))
        return super().write(data)

    def size(self) -> int:
        return self.tell()


def _unpack_stream(path: Path, table: str, target: Path) -> None:
    """How much comes out is not known before; two thirds of the scratch space must stay free for the rest."""
    codec, magic = STREAMS[path.suffix.lower()]
    _check_magic(path, magic, codec)
    progress, read, written, looked = Progress(f"unpack {path.name}", path.stat().st_size, "bytes"), 0, 0, 0
    with open(path, "rb") as packed, open(target, "wb") as plain:
        for chunk in _chunks(path, packed, codec):
            written += plain.write(chunk)
            if written >= looked + LOOK_AT_DISK_EVERY_BYTES:
                looked = written
                check_space(f"{path} ({format_bytes(written)} so far)", target.parent, (SPACE_FACTOR - 1) * written)
            progress.advance(packed.tell() - read)
            read = packed.tell()
        check_space(path, target.parent, (SPACE_FACTOR - 1) * written)
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
