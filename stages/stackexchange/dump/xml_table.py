"""Head and tail of a dump's XML table: whether it is one, where its rows lie, and how to cut them into spans."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 10
CHUNK_BYTES = 1 << 20
DOCTYPE = "declares a DOCTYPE, which a dump never has"
PROLOG = re.compile(rb"\s*+(?:(?><\?.*?\?>|<!--.*?-->)\s*+)*+", re.DOTALL)  # never tried in another way: linear
LOOKS = ((rb"7z\xbc\xaf\x27\x1c", "a 7z archive (name it .7z)"), (rb"PK\x03\x04", "a zip archive"),
         (rb"\x1f\x8b", "gzip (name it .xml.gz)"), (rb"\x28\xb5\x2f\xfd", "zstd (name it .xml.zst)"),
         (rb"PAR1", "a parquet file"), (rb"\xff\xfe|\xfe\xff", "UTF-16 text"),
         (rb"(?i)<!doctype\s+html|<html", "an HTML page"))


@dataclass(frozen=True)
class Place:
    """Rows that start at a byte in [start, stop), of a table whose rows end at `end`."""

    start: int
    stop: int
    end: int
    first: bool

    @property
    def bytes(self) -> int:
        return self.stop - self.start


def places(path: Path, root: str, name: str, span_bytes: int) -> Iterator[Place]:
    """The table's rows in spans of `span_bytes`. ValueError when it is no such table, or is cut short."""
    with open(path, "rb") as stream:
        start = _start_of_rows(stream.read(HEAD_BYTES), root, name)
        end = _end_of_rows(stream, root, name)
    for first in range(start, max(end, start + 1), span_bytes):
        yield Place(first, min(first + span_bytes, end), end, first == start)


class Lines:
    """The 1-based line of bytes of a file; these must be asked for in rising order, and the file is read once."""

    def __init__(self, path: Path):
        self.path, self.line, self.place = path, 1, 0

    def at(self, offset: int) -> int:
        with open(self.path, "rb") as stream:
            stream.seek(self.place)
            while self.place < offset and (chunk := stream.read(min(CHUNK_BYTES, offset - self.place))):
                self.line, self.place = self.line + chunk.count(b"\n"), self.place + len(chunk)
        return self.line


def _start_of_rows(head: bytes, root: str, name: str) -> int:
    """Offset behind `<posts>`."""
    bom = 3 if head.startswith(b"\xef\xbb\xbf") else 0
    opening = PROLOG.match(head, bom).end()
    rest = head[opening:]
    declared = re.search(rb"""encoding\s*=\s*["']([^"']*)""", head[:opening])
    if declared and declared[1].lower() not in (b"utf-8", b"utf8", b"ascii", b"us-ascii"):
        encoding = declared[1].decode("ascii", "replace")[:40]
        raise ValueError(f"{name}: declares the encoding {encoding!r}; a dump is UTF-8")
    if opened := re.match(rb"<%s\s*>" % root.encode(), rest):
        return opening + opened.end()
    what = _looks_like(rest, root, head[:opening].count(b"\n") + 1)
    raise ValueError(f"{name}: not the {root.capitalize()}.xml of a dump: {what}")


def _looks_like(rest: bytes, root: str, line: int) -> str:
    if not rest:
        return "it is empty"
    for pattern, what in LOOKS:
        if re.match(pattern, rest):
            return f"it looks like {what}"
    if rest.startswith(b"<!DOCTYPE"):
        return f"line {line} {DOCTYPE}"
    if re.match(rb"<%s\s*/>" % root.encode(), rest):
        return "its table has no rows"
    if other := re.match(rb"<([A-Za-z_][\w.-]*)", rest):
        return (f"its root element is <{other[1].decode()}>, of another table or another kind of file; "
                f"expected <{root}>")
    return "it is not XML"


def _end_of_rows(stream: BinaryIO, root: str, name: str) -> int:
    """Offset of `</posts>`; looked at before hours are spent on the rows."""
    begin = max(0, stream.seek(0, 2) - TAIL_BYTES)
    stream.seek(begin)
    end = re.search(rb"</%s\s*>\s*\Z" % root.encode(), stream.read())
    if not end:
        raise ValueError(f"{name}: cut short: the file does not end with </{root}>; get or unpack it again")
    return begin + end.start()
