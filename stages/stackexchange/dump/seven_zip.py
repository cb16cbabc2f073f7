"""Unpack one table of a .7z and say what that costs: its block is decoded from the start, whatever lies before it.

Names inside an archive never become paths, and nothing unpacks to more than its header states.
"""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedWriter, FileIO
from pathlib import Path

import py7zr
from py7zr.exceptions import ArchiveError, PasswordRequired, UnsupportedCompressionMethodError
from py7zr.io import NullIO, Py7zIO, WriterFactory

from stages.render.units import format_bytes, format_duration
from stages.runtime.files import check_free_space
from stages.runtime.progress import Progress
from stages.runtime.stage_lines import print_line
from stages.stackexchange.dump.xml_table import check_magic

SPACE_FACTOR = 3  # the file, its rows again in sorted runs, and the result
SCRATCH = "scratch space"
# Unpacked, of one core of an Intel Xeon: LZMA2 on startups.stackexchange.com.7z, BZip2 on beer.stackexchange.com.7z.
BYTES_PER_SECOND = {"LZMA": 50e6, "LZMA2": 50e6, "BZip2": 9e6}
FILTERS = ("BCJ", "DELTA", "COPY")  # cost next to nothing
SHORT_SECONDS = 60  # below, nothing is said
PLAIN_NAME = re.compile(r"[\w-]+\.xml", re.ASCII)


def unpack_7z(archive: Path, table: str, target: Path) -> None:
    """Unpack TABLE.xml of an archive to `target`. Raises ValueError for an archive that is damaged."""
    with open_7z(archive) as opened:
        member = find_table(opened, archive, table)
        needed_bytes, free_bytes = SPACE_FACTOR * member.uncompressed, shutil.disk_usage(target.parent).free
        check_free_space(archive, target.parent, needed_bytes, SCRATCH)
        if line := _describe_cost(opened, archive, member.filename, member.uncompressed, needed_bytes, free_bytes):
            print_line(line)
        before = {name: size for name, size in _list_files_before(opened, member.filename).items()
                  if PLAIN_NAME.fullmatch(name)}  # other names are decoded, too, without a sign of progress
        progress = Progress(f"posts: unpack {table}.xml of {archive.name}", sum(before.values()) + member.uncompressed,
                            "bytes")
        with _py7zr_errors(archive):
            opened.extract(targets=[*before, member.filename],
                           factory=_OneFileFactory(table, target, member.uncompressed, progress))
    progress.finish()
    if not target.is_file() or target.stat().st_size != member.uncompressed:
        raise ValueError(f"{archive}: damaged: {table}.xml does not unpack to the size that the archive states; "
                         f"get it again")


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


def _list_members(opened: py7zr.SevenZipFile, archive: Path) -> list:
    with _py7zr_errors(archive):
        return [file for file in opened.list() if not file.is_directory]


def find_table(opened: py7zr.SevenZipFile, archive: Path, table: str):
    """Return the one file called TABLE.xml, in any letter case and any folder of the archive."""
    matches = find_tables(opened, archive, table)
    if not matches:
        names = _format_names(_list_members(opened, archive)) or "nothing"
        raise ValueError(f"{archive}: holds no {table}.xml, but {names}; expected the archive of a site, or of one of "
                         f"its tables SITE-Posts.7z and SITE-Votes.7z")
    return matches[0]


def find_tables(opened: py7zr.SevenZipFile, archive: Path, table: str) -> list:
    """Return no or one file. Raises ValueError if there are more."""
    matches = [file for file in _list_members(opened, archive)
               if re.split(r"[/\\]", file.filename)[-1].lower() == f"{table}.xml".lower()]
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


def _list_files_before(opened: py7zr.SevenZipFile, filename: str) -> dict[str, int]:
    """Return the files that are decoded before `filename`: names, and unpacked sizes in bytes."""
    files = [file for file in opened.files if not (file.is_directory or file.emptystream)]
    number = next((number for number, file in enumerate(files) if file.filename == filename), 0)
    return {file.filename: file.uncompressed for file in files[:number] if file.folder is files[number].folder}


def estimate_seconds(size_bytes: int, methods: list[str]) -> float:
    """Estimate the seconds to decode so many unpacked bytes; an unknown method is taken for the slowest one."""
    rates = [BYTES_PER_SECOND.get(method, min(BYTES_PER_SECOND.values())) for method in methods
             if not method.upper().startswith(FILTERS)]
    return size_bytes / min(rates, default=max(BYTES_PER_SECOND.values()))


def _describe_cost(opened: py7zr.SevenZipFile, archive: Path, filename: str, size_bytes: int, needed_bytes: int,
                  free_bytes: int) -> str | None:
    """Say in one line what unpacking a file takes; None if that is less than a minute.

    Args:
        size_bytes: of the file, unpacked.
        needed_bytes, free_bytes: of scratch space.
    """
    before_bytes = sum(_list_files_before(opened, filename).values())
    methods = opened.archiveinfo().method_names
    seconds = estimate_seconds(size_bytes + before_bytes, methods)
    if seconds < SHORT_SECONDS:
        return None
    before = f", behind {format_bytes(before_bytes)} of other tables that are decoded first" if before_bytes else ""
    return (f"unpack {filename!r} of {archive}: {format_bytes(size_bytes)}{before}; about {format_duration(seconds)} "
            f"({'+'.join(methods)}); needs {format_bytes(needed_bytes)} of scratch space, {format_bytes(free_bytes)} "
            f"are free")


class _OneFileFactory(WriterFactory):
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
