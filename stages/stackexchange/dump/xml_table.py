"""Read a dump's XML table: streaming, strict and in constant memory; a bad row costs no other row.

An attribute cannot contain a raw `<`, so `<row` always starts a row: a table can be split anywhere into spans that are
read independently. A span is read in blocks of whole rows. lxml parses each block on its own; only a block that fails
is parsed again row by row. A DOCTYPE never reaches the parser, so no entities are expanded but XML's own five and
character references.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from lxml import etree

from stages.stackexchange.dump.scan_log import ScanLog

HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 10
BLOCK_BYTES = 1 << 20
ROW_HEAD_BYTES = 1 << 10
BOM = b"\xef\xbb\xbf"
ROW = b"<row"
ROW_START = re.compile(rb"<(?:[\w.-]+:)?row")  # with a namespace prefix it is a bad row, and no part of the one before
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
            while self.position < offset and (chunk := stream.read(min(BLOCK_BYTES, offset - self.position))):
                self.line, self.position = self.line + chunk.count(b"\n"), self.position + len(chunk)
        return self.line


def check_magic(path: Path, magic: bytes, expected: str) -> None:
    """Raise ValueError unless the file starts with this pattern: it may be a web page or zip archive in disguise."""
    with open(path, "rb") as stream:
        head = stream.read(BLOCK_BYTES)
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


def read_rows(path: Path, span: XmlSpan, log: ScanLog) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield (byte offset, attributes) of every well-formed row of the span, in the file's order.

    Raises ValueError at a DOCTYPE and at anything that is not a row.
    """
    with open(path, "rb") as stream:
        for offset, block in _read_blocks(stream, span, log.max_row_bytes):
            yield from _parse_block(block, offset, path, log)


def _read_blocks(stream: BinaryIO, span: XmlSpan, max_row_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, whole rows) of the span. Of a row over the limit, yield its first max_row_bytes + 1 bytes."""
    stream.seek(span.start)
    offset, buffer = span.start, b""
    if not span.is_first:
        offset, buffer = _seek_row(stream, offset, buffer, span.end)
    while offset < span.stop:
        chunk = stream.read(min(BLOCK_BYTES, span.end - stream.tell()))
        buffer += chunk
        last = buffer.rfind(ROW)
        if offset + last >= span.stop:
            yield offset, buffer[:buffer.find(ROW, span.stop - offset)]
            return
        if not chunk:
            yield offset, buffer
            return
        if last > 0:
            yield offset, buffer[:last]
            offset, buffer = offset + last, buffer[last:]
        elif len(buffer) > max_row_bytes:
            yield offset, buffer[:max_row_bytes + 1]
            offset, buffer = _seek_row(stream, offset + 1, buffer[1:], span.end)


def _seek_row(stream: BinaryIO, offset: int, buffer: bytes, end: int) -> tuple[int, bytes]:
    """Return (offset, bytes read from there on) of the first row at or behind `offset`; (end, b"") if there is none."""
    while (start := buffer.find(ROW)) < 0:
        tail_bytes = min(len(buffer), len(ROW) - 1)
        offset, buffer = offset + len(buffer) - tail_bytes, buffer[len(buffer) - tail_bytes:]
        chunk = stream.read(min(BLOCK_BYTES, end - stream.tell()))
        if not chunk:
            return end, b""
        buffer += chunk
    return offset + start, buffer[start:]


def _parse_block(block: bytes, offset: int, path: Path, log: ScanLog) -> Iterator[tuple[int, dict[str, str]]]:
    starts = [match.start() for match in ROW_START.finditer(block)]
    before = block[:starts[0] if starts else len(block)]
    if not PROLOG.fullmatch(before):
        fault = DOCTYPE if b"<!DOCTYPE" in before else "holds something other than rows"
        line = LineNumbers(path).at(offset + len(before) - len(before.lstrip()))
        raise ValueError(f"{log.name}: line {line} {fault}")
    log.counts["rows_read"] += len(starts)
    is_plain = len(block) <= log.max_row_bytes and block.count(ROW) == len(starts)
    rows = _parse(block) if is_plain else None
    if rows is not None and len(rows) == len(starts):
        yield from zip((offset + start for start in starts), rows, strict=True)
        return
    for start, stop in pairwise([*starts, len(block)]):
        row = _parse_row(block[start:stop], offset + start, path, log)
        if row is not None:
            yield offset + start, row


def _parse_row(row: bytes, offset: int, path: Path, log: ScanLog) -> dict[str, str] | None:
    """Parse one row of a block that failed as a whole; set it aside and return None if it is at fault."""
    if b"<!DOCTYPE" in row:
        raise ValueError(f"{log.name}: line {LineNumbers(path).at(offset)} {DOCTYPE}")
    row = row.rstrip()
    too_long = len(row) > log.max_row_bytes
    if not too_long and row.startswith(ROW) and (rows := _parse(row)) and len(rows) == 1:
        return rows[0]
    row_id = re.search(rb"""\sId\s*=\s*["'](-?\d{1,19})["']""", row[:ROW_HEAD_BYTES])
    reason = f"over {log.max_row_bytes} bytes" if too_long else _describe_fault(row)
    log.set_aside(reason, offset, row_id[1].decode() if row_id else None)
    return None


class _RowTarget:
    """Parser target: collects the attributes of rows, and None for other elements and for text inside the table."""

    def __init__(self):
        self.rows: list[dict[str, str] | None] = []
        self.depth = 0

    def start(self, tag, attributes):
        self.depth += 1
        if self.depth > 1:
            self.rows.append(attributes if tag == "row" and self.depth == 2 else None)

    def data(self, text):
        if not text.isspace():
            self.rows.append(None)

    def end(self, tag):
        self.depth -= 1

    def close(self):
        return self.rows


def _parse(xml: bytes) -> list[dict[str, str]] | None:
    """Return the attributes of each row, or None if `xml` is not well-formed UTF-8 XML of rows only."""
    try:
        rows = _feed(xml)
    except etree.XMLSyntaxError:
        return None
    return None if None in rows else rows


def _feed(xml: bytes) -> list:
    # huge_tree: max_row_bytes limits a row, not libxml2's 10 MB.
    parser = etree.XMLParser(target=_RowTarget(), huge_tree=True)
    for data in (b"<table>", xml, b"</table>"):
        parser.feed(data)
    return parser.close()


def _describe_fault(row: bytes) -> str:
    if not row.startswith(ROW):
        return "a row with a namespace prefix"
    try:
        _feed(row)
    except etree.XMLSyntaxError as error:
        return " ".join(str(error.msg).split()).removesuffix("(<string>, line 1)").strip()
    return "holds something other than one row"
