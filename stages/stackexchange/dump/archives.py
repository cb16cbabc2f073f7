"""Unpack a table of a dump from a .7z, .gz or .zst to plain XML in scratch space, atomically.

Names inside an archive never become paths, and nothing unpacks to more than its header states or the disk can hold.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import py7zr
import pyarrow as pa
from py7zr.exceptions import ArchiveError, PasswordRequired, UnsupportedCompressionMethodError
from py7zr.io import NullIO, Py7zIO, WriterFactory

from stages.render.units import format_bytes, format_duration
from stages.runtime.files import check_free_space
from stages.runtime.progress import Progress
from stages.runtime.stage_lines import print_line
from stages.stackexchange.dump.xml_table import check_magic

CHUNK_BYTES = 1 << 20
SPACE_CHECK_BYTES = 64 << 20
SPACE_FACTOR = 3  # the file, its rows again in sorted runs, and the result
SCRATCH = "scratch space"
# Unpacked, of one core of an Intel Xeon: LZMA2 on startups.stackexchange.com.7z, BZip2 on beer.stackexchange.com.7z.
LZMA_BYTES_PER_SECOND, BZIP2_BYTES_PER_SECOND = 50e6, 9e6
LONG_SECONDS = 60  # from here on, the time is announced
PLAIN_NAME = re.compile(r"[\w-]+\.xml", re.ASCII)
STREAMS = {".gz": ("gzip", rb"\x1f\x8b"),
           ".zst": ("zstd", rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")}  # the latter starts a frame to skip


@dataclass(frozen=True)
class Table:
    """One table of a dump, in any of the accepted files."""

    path: str  # file as given: Posts.xml, Posts.xml.gz, Posts.xml.zst, or a .7z that holds it
    name: str  # "Posts" or "Votes"


def unpack_table(table: Table, folder: Path) -> Path:
    """Return the table's plain XML: its own file, or one in `folder`, unpacked now or by a run that was killed.

    Raises ValueError if the file is not what its name says or is damaged, if an archive does not contain the table, or
    if the disk is too full.
    """
    path = Path(table.path)
    if path.suffix.lower() not in UNPACK:
        return path
    target = folder / f"{table.name}-{_fingerprint(path)}.xml"
    if not target.exists():
        draft = target.with_suffix(".draft")  # that of a run that was killed is overwritten
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
    with open_7z(archive) as opened:
        find_table(opened, archive, required)
        return [required, *(table for table in others if _find_tables(opened, archive, table))]


def required_bytes(table: Table) -> int:
    """Return the scratch space in bytes for reading a table; 0 for a .gz or .zst, which does not say its size."""
    path = Path(table.path)
    if path.suffix.lower() == ".7z":
        with open_7z(path) as opened:
            return SPACE_FACTOR * find_table(opened, path, table.name).uncompressed
    return 0 if path.suffix.lower() in UNPACK else (SPACE_FACTOR - 1) * path.stat().st_size


def _fingerprint(path: Path) -> str:
    """Hash path, size and time of a file, so that an archive that was replaced is unpacked again."""
    stat = path.stat()
    text = f"{path.absolute()}\n{stat.st_size}\n{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


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


def _unpack_7z(archive: Path, table: str, target: Path) -> None:
    """Unpack TABLE.xml of an archive to `target`. Raises ValueError for an archive that is damaged."""
    with open_7z(archive) as opened, open(target, "wb") as stream:
        member = find_table(opened, archive, table)
        check_free_space(archive, target.parent, SPACE_FACTOR * member.uncompressed, SCRATCH)
        before = _list_files_before(opened, member.filename)
        _announce_time(archive, member, sum(before.values()), opened.archiveinfo().method_names)
        progress = Progress(f"posts: unpack {table}.xml of {archive.name}", sum(before.values()) + member.uncompressed,
                            "bytes")
        with _py7zr_errors(archive):
            opened.extract(targets=[*before, member.filename],
                           factory=_OneFileFactory(table, stream, member.uncompressed, progress))
    progress.finish()
    if target.stat().st_size != member.uncompressed:
        raise ValueError(f"{archive}: damaged: {table}.xml does not unpack to the size that the archive states; "
                         f"get it again")


UNPACK = {".7z": _unpack_7z, ".gz": _unpack_stream, ".zst": _unpack_stream}


@contextmanager
def open_7z(archive: Path) -> Iterator[py7zr.SevenZipFile]:
    """Open an archive; ValueError for another file, a damaged one, and one with a password."""
    check_magic(archive, rb"7z\xbc\xaf\x27\x1c", "a 7z archive")
    with _py7zr_errors(archive):
        opened = py7zr.SevenZipFile(archive)
    with opened:
        if opened.needs_password():
            raise _password_error(archive)
        yield opened


def find_table(opened: py7zr.SevenZipFile, archive: Path, table: str) -> py7zr.FileInfo:
    """Return the one file called TABLE.xml, in any letter case and any folder of the archive."""
    matches = _find_tables(opened, archive, table)
    if not matches:
        names = _format_names(_list_members(opened, archive)) or "nothing"
        raise ValueError(f"{archive}: holds no {table}.xml, but {names}; expected the archive of a site, or of one of "
                         f"its tables SITE-Posts.7z and SITE-Votes.7z")
    return matches[0]


def _find_tables(opened: py7zr.SevenZipFile, archive: Path, table: str) -> list[py7zr.FileInfo]:
    """Return no or one file. Raises ValueError if there are more."""
    matches = [file for file in _list_members(opened, archive) if _base_name(file.filename) == f"{table}.xml".lower()]
    if len(matches) > 1:
        raise ValueError(f"{archive}: holds {_format_names(matches)}; expected those of one site: unpack it, give its "
                         f"folders")
    return matches


def _list_members(opened: py7zr.SevenZipFile, archive: Path) -> list[py7zr.FileInfo]:
    with _py7zr_errors(archive):
        return [file for file in opened.list() if not file.is_directory]


def _base_name(filename: str) -> str:
    return re.split(r"[/\\]", filename)[-1].lower()


def _format_names(files: list[py7zr.FileInfo]) -> str:
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


def _list_files_before(opened: py7zr.SevenZipFile, filename: str) -> dict[str, int]:
    """Return the files that are decoded before `filename`: names, and unpacked sizes in bytes.

    Names that could be paths are left out: those files are decoded, too, but without a sign of progress.
    """
    files = [file for file in opened.files if not (file.is_directory or file.emptystream)]
    number = next((number for number, file in enumerate(files) if file.filename == filename), 0)
    return {file.filename: file.uncompressed for file in files[:number]
            if file.folder is files[number].folder and PLAIN_NAME.fullmatch(file.filename)}


def _announce_time(archive: Path, member: py7zr.FileInfo, bytes_before: int, methods: list[str]) -> None:
    """Print what unpacking a file takes, if that is a minute or more."""
    rate = BZIP2_BYTES_PER_SECOND if "BZip2" in methods else LZMA_BYTES_PER_SECOND
    seconds = (member.uncompressed + bytes_before) / rate
    before = f", behind {format_bytes(bytes_before)} of other tables that are decoded first" if bytes_before else ""
    if seconds >= LONG_SECONDS:
        print_line(f"unpack {member.filename!r} of {archive}: {format_bytes(member.uncompressed)}{before}; about "
                   f"{format_duration(seconds)} ({'+'.join(methods)}); needs "
                   f"{format_bytes(SPACE_FACTOR * member.uncompressed)} of scratch space")


class _OneFileFactory(WriterFactory):
    """Write TABLE.xml to one stream, whatever its name in the archive, and count the bytes of all files."""

    def __init__(self, table: str, stream: BinaryIO, size: int, progress: Progress):
        self.name, self.stream, self.size, self.progress = f"{table}.xml".lower(), stream, size, progress

    def create(self, filename: str) -> Py7zIO:
        """Return the writer of a member of the archive."""
        return Member(self.stream if _base_name(filename) == self.name else None, self.size, self.progress)


class Member(NullIO):
    """Count the bytes of a member as progress, and write them to `stream`, if given, up to the size in the header."""

    def __init__(self, stream: BinaryIO | None, limit: int, progress: Progress):
        super().__init__()
        self.stream, self.limit, self.progress, self.written = stream, limit, progress, 0

    def write(self, data: bytes | bytearray) -> int:
        """Take bytes; ArchiveError, with nothing written, beyond the size."""
        self.written += len(data)
        if self.stream is not None:
            if self.written > self.limit:
                raise ArchiveError("unpacks to more than it states")
            self.stream.write(data)
        self.progress.advance(len(data))
        return len(data)

    def size(self) -> int:
        """Return the bytes written so far."""
        return self.written
