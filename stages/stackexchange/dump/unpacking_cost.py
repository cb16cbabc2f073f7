"""Estimate what it costs to unpack one table of a .7z: its block is decoded from the start, whatever lies before it."""

import re
from pathlib import Path

import py7zr

from stages.render.units import format_bytes, format_duration

# Unpacked, of one core of an Intel Xeon: LZMA2 on startups.stackexchange.com.7z, BZip2 on beer.stackexchange.com.7z.
BYTES_PER_SECOND = {"LZMA": 50e6, "LZMA2": 50e6, "BZip2": 9e6}
FILTERS = ("BCJ", "DELTA", "COPY")  # cost next to nothing
SHORT_SECONDS = 60  # below, nothing is said
PLAIN_NAME = re.compile(r"[\w-]+\.xml", re.ASCII)


def list_files_before(opened: py7zr.SevenZipFile, filename: str) -> dict[str, int]:
    """Return the files that are decoded before `filename`: names, and unpacked sizes in bytes."""
    files = [file for file in opened.files if not (file.is_directory or file.emptystream)]
    number = next((number for number, file in enumerate(files) if file.filename == filename), 0)
    return {file.filename: file.uncompressed for file in files[:number] if file.folder is files[number].folder}


def estimate_seconds(size_bytes: int, methods: list[str]) -> float:
    """Estimate the seconds to decode so many unpacked bytes; an unknown method is taken for the slowest one."""
    rates = [BYTES_PER_SECOND.get(method, min(BYTES_PER_SECOND.values())) for method in methods
             if not method.upper().startswith(FILTERS)]
    return size_bytes / min(rates, default=max(BYTES_PER_SECOND.values()))


def describe_cost(opened: py7zr.SevenZipFile, archive: Path, filename: str, size_bytes: int, needed_bytes: int,
                  free_bytes: int) -> str | None:
    """Say in one line what unpacking a file takes; None if that is less than a minute.

    Args:
        size_bytes: of the file, unpacked.
        needed_bytes, free_bytes: of scratch space.
    """
    before_bytes = sum(list_files_before(opened, filename).values())
    methods = opened.archiveinfo().method_names
    seconds = estimate_seconds(size_bytes + before_bytes, methods)
    if seconds < SHORT_SECONDS:
        return None
    before = f", behind {format_bytes(before_bytes)} of other tables that are decoded first" if before_bytes else ""
    return (f"unpack {filename!r} of {archive}: {format_bytes(size_bytes)}{before}; about {format_duration(seconds)} "
            f"({'+'.join(methods)}); needs {format_bytes(needed_bytes)} of scratch space, {format_bytes(free_bytes)} "
            f"are free")
