"""The Posts.xml of an official .7z archive: that member alone, streamed to scratch space."""

import shutil
from lzma import LZMAError
from pathlib import Path

import py7zr
from py7zr.exceptions import ArchiveError, PasswordRequired
from py7zr.io import Py7zIO, WriterFactory

from stages.plumbing.progress import Progress

SPACE_FACTOR = 3  # the file, and its rows once more in runs, and the result


def unpack_posts(archive: Path, folder: Path) -> Path:
    """Write the archive's Posts.xml (in any letter case, in any folder of it) to `folder/Posts.xml`.

    Raises ValueError when it is no such archive, is damaged, or the disk is too full.
    """
    target = folder / "Posts.xml"
    try:
        with py7zr.SevenZipFile(archive) as opened:
            member = _member(opened, archive)
            _check_space(archive, folder, member.uncompressed)
            progress = Progress(f"unpack {archive.name}", member.uncompressed, "bytes")
            opened.extract(targets=[member.filename], factory=_To(target, member.uncompressed, progress))
    except PasswordRequired:
        raise ValueError(f"{archive}: needs a password; a dump's archive does not") from None
    except (ArchiveError, LZMAError, EOFError) as error:
        kind = type(error).__name__
        raise ValueError(f"{archive}: not a 7z archive, or damaged ({kind}); download it again") from None
    if not target.is_file() or target.stat().st_size != member.uncompressed:
        raise ValueError(f"{archive}: damaged: Posts.xml does not unpack to the size that the archive states")
    return target


def _member(opened: py7zr.SevenZipFile, archive: Path):
    files = opened.list()
    for member in files:
        if member.filename.replace("\\", "/").rpartition("/")[2].lower() == "posts.xml" and not member.is_directory:
            return member
    raise ValueError(f"{archive}: holds no Posts.xml, but {', '.join(f.filename for f in files[:8]) or 'nothing'}")


def _check_space(archive: Path, folder: Path, size: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < SPACE_FACTOR * size:
        raise ValueError(f"{archive}: needs {SPACE_FACTOR * size / 1e9:.1f} GB of scratch space under {folder}, where "
                         f"{free / 1e9:.1f} GB are free")


class _To(WriterFactory):
    """Hands out one file of our own naming: a name inside an archive never becomes a path."""

    def __init__(self, target: Path, size: int, progress: Progress):
        self.file = _File(target, size, progress)

    def create(self, filename: str) -> Py7zIO:
        return self.file


class _File(Py7zIO):
    """A file that refuses to grow over what the archive's header states."""

    def __init__(self, target: Path, limit: int, progress: Progress):
        self.stream = open(target, "wb")  # noqa: SIM115  py7zr calls close
        self.left, self.progress = limit, progress

    def write(self, data: bytes | bytearray) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise ArchiveError("unpacks to more than it states")
        self.progress.advance(len(data))
        return self.stream.write(data)

    def read(self, size: int | None = None) -> bytes:
        return b""

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.stream.seek(offset, whence)

    def flush(self) -> None:
        self.stream.flush()

    def size(self) -> int:
        return self.stream.tell()

    def close(self) -> None:
        self.stream.close()
