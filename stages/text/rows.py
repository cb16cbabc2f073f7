"""Bytes of a Posts.xml to rows: streaming, strict, in flat memory, and one bad row never takes the others with it.

Raw `<` cannot stand in an attribute, so `<row` marks the start of a row and nothing else. The file is read in blocks of
whole rows; each block is parsed by lxml on its own, and only a block that fails is parsed again row by row. A DOCTYPE
can therefore never reach the parser (and no entity is ever expanded but XML's own five and character references).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

from lxml import etree

from stages.plumbing.progress import Progress

BLOCK_BYTES = 1 << 20
HEAD_BYTES = 1 << 16
TAIL_BYTES = 1 << 10
ROWS_BEFORE_EARLY_STOP = 100_000
ROW = b"<row"
DOCTYPE = "declares a DOCTYPE, which a dump never has"
END = re.compile(rb"</posts\s*>\s*\Z")
PROLOG = re.compile(rb"\s*(?:<\?.*?\?>\s*|<!--.*?-->\s*)*", re.DOTALL)
LOOKS = ((rb"7z\xbc\xaf\x27\x1c", "a 7z archive (name it .7z)"), (rb"PK\x03\x04", "a zip archive"),
         (rb"\x1f\x8b", "a gzip archive"), (rb"PAR1", "a parquet file"), (rb"\xff\xfe|\xfe\xff", "UTF-16 text"),
         (rb"(?i)<!doctype\s+html|<html", "an HTML page"))


@dataclass
class Reading:
    """One source while it is read: what bounds it, where its bad rows go, what was counted.

    Counts: rows_read, rows_set_aside, bytes_read, `dropped: REASON`; every row read is used, set aside or dropped.
    """

    name: str
    scratch: Path
    quarantine: TextIO
    max_row_bytes: int
    max_bad_rows_share: float
    counts: Counter = field(default_factory=Counter)

    def set_aside(self, reason: str, line: int, row: str | None, offset: int | None = None) -> None:
        """Write one bad row's place (1-based line, byte offset) and reason to quarantine.jsonl."""
        self.counts["rows_set_aside"] += 1
        record = {"source": self.name, "line": line, "offset": offset, "id": row, "reason": reason}
        self.quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")

    def check_share(self, at_least: int = 1) -> None:
        """ValueError when too many of the rows read so far (once there are `at_least`) were set aside."""
        rows, bad = self.counts["rows_read"], self.counts["rows_set_aside"]
        if rows >= at_least and bad > self.max_bad_rows_share * rows:
            raise ValueError(f"{self.name}: {bad} of {rows} rows cannot be read, more than max_bad_rows_share="
                             f"{self.max_bad_rows_share:g} allows; reasons are in {self.quarantine.name}")


def rows(path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, str]]]:
    """(line, attributes) of every row of a Posts.xml that is well-formed XML, in the file's order.

    Raises ValueError when the file is no Posts.xml, is cut short, holds a DOCTYPE, or holds too many bad rows.
    """
    progress = Progress(f"read {reading.name}", path.stat().st_size, "bytes")
    with open(path, "rb") as stream:
        head = stream.read(HEAD_BYTES)
        progress.advance(len(head))
        start = _start_of_rows(head, reading.name)
        _check_end(stream, reading.name)
        line = head[:start].count(b"\n") + 1
        for offset, block, newlines in _blocks(stream, head[start:], start, reading, progress):
            yield from _rows_of(block, line, offset, reading)
            reading.check_share(at_least=ROWS_BEFORE_EARLY_STOP)
            line += newlines
    progress.finish()
    reading.counts["bytes_read"] += path.stat().st_size
    if not reading.counts["rows_read"]:
        raise ValueError(f"{reading.name}: a posts table without a single row")
    reading.check_share()


def _start_of_rows(head: bytes, name: str) -> int:
    """Offset behind `<posts>`."""
    bom = 3 if head.startswith(b"\xef\xbb\xbf") else 0
    root = PROLOG.match(head, bom).end()
    rest = head[root:]
    declared = re.search(rb"""encoding\s*=\s*["']([^"']*)""", head[:root])
    if declared and declared[1].lower() not in (b"utf-8", b"utf8", b"ascii", b"us-ascii"):
        raise ValueError(f"{name}: declares the encoding {declared[1].decode('ascii', 'replace')}; a dump is UTF-8")
    if opened := re.match(rb"<posts\s*>", rest):
        return root + opened.end()
    raise ValueError(f"{name}: not the Posts.xml of a dump: {_looks_like(rest, head[:root].count(10) + 1)}")


def _looks_like(rest: bytes, line: int) -> str:
    if not rest:
        return "it is empty"
    for pattern, what in LOOKS:
        if re.match(pattern, rest):
            return f"it looks like {what}"
    if rest.startswith(b"<!DOCTYPE"):
        return f"line {line} {DOCTYPE}"
    if re.match(rb"<posts\s*/>", rest):
        return "its table has no rows"
    if root := re.match(rb"<([A-Za-z_][\w.-]*)", rest):
        return f"its root element is <{root[1].decode()}>, of another table or another kind of file; expected <posts>"
    return "it is not XML"


def _check_end(stream: BinaryIO, name: str) -> None:
    """Before hours are spent on the rows. Leaves the stream where it was."""
    place = stream.tell()
    stream.seek(max(0, stream.seek(0, 2) - TAIL_BYTES))
    if not END.search(stream.read()):
        raise ValueError(f"{name}: cut short: the file does not end with </posts>; get or unpack it again")
    stream.seek(place)


def _blocks(stream: BinaryIO, held: bytes, offset: int, reading: Reading, progress: Progress
            ) -> Iterator[tuple[int, bytes, int]]:
    """(offset, whole rows, number of newlines); of a row over the limit only its first limit + 1 bytes."""
    while chunk := stream.read(BLOCK_BYTES):
        progress.advance(len(chunk))
        held += chunk
        cut = held.rfind(ROW)
        if cut > 0:
            yield offset, held[:cut], held.count(b"\n", 0, cut)
            offset, held = offset + cut, held[cut:]
        elif len(held) > reading.max_row_bytes:
            first = held[:reading.max_row_bytes + 1]
            skipped, newlines, held = _skip_row(stream, held, progress)
            yield offset, first, newlines
            offset += skipped
    yield offset, held[:END.search(held, max(0, len(held) - TAIL_BYTES)).start()], 0


def _skip_row(stream: BinaryIO, held: bytes, progress: Progress) -> tuple[int, int, bytes]:
    """Read past one row. Returns bytes and newlines skipped, and the bytes from the next row (or `</posts>`) on."""
    skipped = newlines = 0
    while (following := held.find(ROW, 1)) < 0:
        chunk = stream.read(BLOCK_BYTES)
        if not chunk:
            following = END.search(held, max(0, len(held) - TAIL_BYTES)).start()
            break
        progress.advance(len(chunk))
        gone = max(0, len(held) - TAIL_BYTES)
        skipped, newlines, held = skipped + gone, newlines + held.count(b"\n", 0, gone), held[gone:] + chunk
    return skipped + following, newlines + held.count(b"\n", 0, following), held[following:]


def _rows_of(block: bytes, line: int, offset: int, reading: Reading) -> Iterator[tuple[int, dict[str, str]]]:
    before, *pieces = block.split(ROW)
    if not PROLOG.fullmatch(before):
        what = DOCTYPE if b"<!DOCTYPE" in before else "holds something other than rows"
        raise ValueError(f"{reading.name}: line {line + before[:len(before) - len(before.lstrip())].count(10)} {what}")
    line, offset = line + before.count(b"\n"), offset + len(before)
    reading.counts["rows_read"] += len(pieces)
    parsed = _parsed(block) if len(block) <= reading.max_row_bytes else None
    if parsed is not None and len(parsed) != len(pieces):
        parsed = None
    for number, piece in enumerate(pieces):
        row = parsed[number] if parsed else _alone(ROW + piece, line, offset, reading)
        if row is not None:
            yield line, row
        line, offset = line + piece.count(b"\n"), offset + len(ROW) + len(piece)


def _alone(row: bytes, line: int, offset: int, reading: Reading) -> dict[str, str] | None:
    """One row of a block that does not parse as a whole; None when this is the row at fault."""
    if b"<!DOCTYPE" in row:
        raise ValueError(f"{reading.name}: line {line} {DOCTYPE}")
    row = row.rstrip()
    too_long = len(row) > reading.max_row_bytes
    if not too_long and (parsed := _parsed(row)):
        return parsed[0]
    number = re.search(rb"""\sId\s*=\s*["'](-?\d{1,19})["']""", row[:TAIL_BYTES])
    reason = f"over {reading.max_row_bytes} bytes" if too_long else _fault(row)
    reading.set_aside(reason, line, number[1].decode() if number else None, offset)
    return None


class _Target:
    """Collects the attributes of rows, and None for anything else inside <posts>: other elements, and text."""

    def __init__(self):
        self.found: list[dict[str, str] | None] = []

    def start(self, tag, attributes):
        if tag != "posts":
            self.found.append(attributes if tag == "row" else None)

    def data(self, text):
        if not text.isspace():
            self.found.append(None)

    def end(self, tag):
        pass

    def close(self):
        return self.found


def _parsed(rows_of_block: bytes) -> list[dict[str, str]] | None:
    """Attributes of each row, or None when this is not well-formed UTF-8 XML of rows only."""
    try:
        found = _feed(rows_of_block)
    except etree.XMLSyntaxError:
        return None
    return None if None in found else found


def _feed(rows_of_block: bytes) -> list:
    parser = etree.XMLParser(target=_Target(), huge_tree=True)  # max_row_bytes bounds a row, not libxml2's 10 MB
    for part in (b"<posts>", rows_of_block, b"</posts>"):
        parser.feed(part)
    return parser.close()


def _fault(row: bytes) -> str:
    try:
        _feed(row)
    except etree.XMLSyntaxError as error:
        return " ".join(str(error.msg).split()).removesuffix("(<string>, line 1)").strip()
    return "holds something other than one row"
