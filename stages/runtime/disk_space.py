"""Refuse, in one line and before it is begun, to write what the disk has no room for."""

import shutil
from pathlib import Path

from stages.render.units import format_bytes
from stages.runtime.files import list_files


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
