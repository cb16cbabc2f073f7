"""Check the first bytes of a file, and head and tail of a dump's XML table; split its rows into spans of bytes."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 10
CHUNK_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
DOCTYPE = "declares a DOCTYPE, which a dump never has"
PROLOG = re.compile(rb"\s*+(?:(?><\?.*?\?>|<!--.*?-->)\s*+)*+", re.DOTALL)  # possessive quantifiers: linear time
LOOKS = ((rb"7z\xbc\xaf\x27\x1c", "a 7z archive (name it .7z)"), (rb"PK\x03\x04", "a zip archive"),
         (rb"\x1f\x8b", "gzip (name it .xml.gz)"), (rb"\x28\xb5\x2f\xfd", "zstd (name it .xml.zst)"),
         (rb"PAR1", "a parquet file"), (rb"\xff\xfe|\xfe\xff", "UTF-16 text"),
         (rb"(?i)<!doctype\s+html|<html", "an HTML page"))
ARCHIVE_LOOKS = ((rb"Rar!", "a rar archive"), (rb"<\?xml|<posts|<votes", "plain XML (name it .xml)"))


@dataclass(frozen=True)
class XmlSpan:
    """The rows whose first byte is in [start, stop), in a table whose rows end at byte `end`."""

    start: int
    stop: int
    end: int
    is_first: bool

    @property
    def bytes(self) -> int:
        """Size of the span."""
        return self.stop - self.start


def split_spans(path: Path, root: str, name: str, span_bytes: int) -> Iterator[XmlSpan]:
    """Split the rows of the table <root> into spans of `span_bytes`.

    Raises ValueError, with `name` for the file, if it is not such a table or is cut short.
    """
    with open(path, "rb") as stream:
        rows_start = _find_rows_start(stream.read(HEAD_BYTES), root, name)
        rows_end = _find_rows_end(stream, root, name)
    for start in range(rows_start, max(rows_end, rows_start + 1), span_bytes):
        yield XmlSpan(start, min(start + span_bytes, rows_end), rows_end, start == rows_start)


class LineNumbers:
    """Convert byte offsets of a file, given in rising order, to line numbers; the file is read once."""

    def __init__(self, path: Path):
        self.path, self.line, self.position = path, 1, 0

    def at(self, offset: int) -> int:
        """Return the 1-based line of a byte."""
        with open(self.path, "rb") as stream:
            stream.seek(self.position)
            while self.position < offset and (chunk := stream.read(min(CHUNK_BYTES, offset - self.position))):
                self.line, self.position = self.line + chunk.count(b"\n"), self.position + len(chunk)
        return self.line


def check_magic(path: Path, magic: bytes, expected: str) -> None:
    """Raise ValueError unless the file starts with this pattern: it may be a web page or zip archive in disguise."""
    with open(path, "rb") as stream:
        head = stream.read(CHUNK_BYTES)
    if re.match(magic, head):
        return
    text = head.removeprefix(BOM).lstrip()
    looks = next((f"it looks like {kind}" for pattern, kind in LOOKS + ARCHIVE_LOOKS if re.match(pattern, text)), None)
    looks = looks or ("it is something else" if head else "it is empty")
    raise ValueError(f"{path}: not {expected}: {looks}; get the right file, or give it its right name")


def _find_rows_start(head: bytes, root: str, name: str) -> int:
    """Return the offset behind `<posts>`."""
    prolog_end = PROLOG.match(head, len(BOM) if head.startswith(BOM) else 0).end()
    rest = head[prolog_end:]
    declared = re.search(rb"""encoding\s*=\s*["']([^"']*)""", head[:prolog_end])
    if declared and declared[1].lower() not in (b"utf-8", b"utf8", b"ascii", b"us-ascii"):
        encoding = declared[1].decode("ascii", "replace")[:40]
        raise ValueError(f"{name}: declares the encoding {encoding!r}; a dump is UTF-8")
    if opening_tag := re.match(rb"<%s\s*>" % root.encode(), rest):
        return prolog_end + opening_tag.end()
    description = _describe(rest, root, head[:prolog_end].count(b"\n") + 1)
    raise ValueError(f"{name}: not the {root.capitalize()}.xml of a dump: {description}")


def _describe(rest: bytes, root: str, line: int) -> str:
    if not rest:
        return "it is empty"
    for pattern, kind in LOOKS:
        if re.match(pattern, rest):
            return f"it looks like {kind}"
    if rest.startswith(b"<!DOCTYPE"):
        return f"line {line} {DOCTYPE}"
    if re.match(rb"<%s\s*/>" % root.encode(), rest):
        return "its table has no rows"
    if other := re.match(rb"<([A-Za-z_][\w.-]*)", rest):
        return (f"its root element is <{other[1].decode()}>, of another table or another kind of file; "
                f"expected <{root}>")
    return "it is not XML"


def _find_rows_end(stream: BinaryIO, root: str, name: str) -> int:
    """Return the offset of `</posts>`. It is checked before hours are spent on the rows."""
    tail_start = max(0, stream.seek(0, 2) - TAIL_BYTES)
    stream.seek(tail_start)
    end = re.search(rb"</%s\s*>\s*\Z" % root.encode(), stream.read())
    if not end:
        raise ValueError(f"{name}: cut short: the file does not end with </{root}>; get or unpack it again")
    return tail_start + end.start()
