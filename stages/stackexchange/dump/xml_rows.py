"""Bytes of a dump's XML table to rows: streaming, strict, in flat memory, and one bad row never costs the others.

Raw `<` cannot stand in an attribute, so `<row` marks the start of a row and nothing else: a table can be cut anywhere
into spans that are read apart. A span is read in blocks of whole rows; each block is parsed by lxml on its own, and
only a block that fails is parsed again row by row. A DOCTYPE can therefore never reach the parser (and no entity is
ever expanded but XML's own five and character references).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, TextIO

from lxml import etree

from stages.stackexchange.dump.xml_table import DOCTYPE, PROLOG, Lines, Place

BLOCK_BYTES = 1 << 20
HEAD_OF_ROW_BYTES = 1 << 10
ROWS_BEFORE_EARLY_STOP = 100_000
ROW = b"<row"
ANY_ROW = re.compile(ROW)


@dataclass
class Reading:
    """What is read, what bounds it, where its bad rows go, what was counted.

    Counts: rows_read, rows_set_aside, `dropped: REASON`; every row read is used, set aside or dropped.
    """

    name: str
    quarantine: TextIO
    max_row_bytes: int
    max_bad_rows_share: float
    counts: Counter = field(default_factory=Counter)

    def set_aside(self, reason: str, offset: int, row: str | None) -> None:
        """Write one bad row's place (byte offset, or number of the record) and reason to the quarantine."""
        self.counts["rows_set_aside"] += 1
        record = {"source": self.name, "offset": offset, "id": row, "reason": reason}
        self.quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")

    def check_share(self, at_least: int = ROWS_BEFORE_EARLY_STOP) -> None:
        """ValueError when too many of the rows read so far (once there are `at_least`) were set aside."""
        check_share(self.name, self.counts, self.max_bad_rows_share, at_least)


def check_share(name: str, counts: Counter, allowed: float, at_least: int = 1) -> None:
    """ValueError when too many of `rows_read` are `rows_set_aside`."""
    rows_read, bad = counts["rows_read"], counts["rows_set_aside"]
    if rows_read >= at_least and bad > allowed * rows_read:
        raise ValueError(f"{name}: {bad} of {rows_read} rows cannot be read, more than max_bad_rows_share={allowed:g} "
                         f"allows; quarantine.jsonl in the stage's .partial folder says why")


def rows(path: Path, place: Place, reading: Reading) -> Iterator[tuple[int, dict[str, str]]]:
    """(byte offset, attributes) of every well-formed row that starts in `place`, in the file's order.

    Raises ValueError at a DOCTYPE, at anything that is no row, and at too many bad rows.
    """
    with open(path, "rb") as stream:
        for offset, block in _blocks(stream, place, reading.max_row_bytes):
            yield from _rows_of(block, offset, path, reading)
            reading.check_share()


def _blocks(stream: BinaryIO, place: Place, max_row_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(offset, whole rows) of the rows that start in `place`; of a row over the limit its first limit + 1 bytes."""
    stream.seek(place.start)
    offset, held = place.start, b""
    if not place.first:
        offset, held = _next_row(stream, offset, held, place.end)
    while offset < place.stop:
        chunk = stream.read(min(BLOCK_BYTES, place.end - stream.tell()))
        held += chunk
        last = held.rfind(ROW)
        if offset + last >= place.stop:
            yield offset, held[:held.find(ROW, place.stop - offset)]
            return
        if not chunk:
            yield offset, held
            return
        if last > 0:
            yield offset, held[:last]
            offset, held = offset + last, held[last:]
        elif len(held) > max_row_bytes:
            yield offset, held[:max_row_bytes + 1]
            offset, held = _next_row(stream, offset + 1, held[1:], place.end)


def _next_row(stream: BinaryIO, offset: int, held: bytes, end: int) -> tuple[int, bytes]:
    """(offset, bytes read from there on) of the first row at `offset` or behind it; (end, nothing) without one."""
    while (found := held.find(ROW)) < 0:
        kept = min(len(held), len(ROW) - 1)
        offset, held = offset + len(held) - kept, held[len(held) - kept:]
        chunk = stream.read(min(BLOCK_BYTES, end - stream.tell()))
        if not chunk:
            return end, b""
        held += chunk
    return offset + found, held[found:]


def _rows_of(block: bytes, offset: int, path: Path, reading: Reading) -> Iterator[tuple[int, dict[str, str]]]:
    starts = [found.start() for found in ANY_ROW.finditer(block)]
    before = block[:starts[0] if starts else len(block)]
    if not PROLOG.fullmatch(before):
        what = DOCTYPE if b"<!DOCTYPE" in before else "holds something other than rows"
        line = Lines(path).at(offset + len(before) - len(before.lstrip()))
        raise ValueError(f"{reading.name}: line {line} {what}")
    reading.counts["rows_read"] += len(starts)
    parsed = _parsed(block) if len(block) <= reading.max_row_bytes else None
    if parsed is not None and len(parsed) == len(starts):
        yield from zip((offset + start for start in starts), parsed, strict=True)
        return
    for start, stop in pairwise([*starts, len(block)]):
        row = _alone(block[start:stop], offset + start, path, reading)
        if row is not None:
            yield offset + start, row


def _alone(row: bytes, offset: int, path: Path, reading: Reading) -> dict[str, str] | None:
    """One row of a block that does not parse as a whole; None when this is the row at fault."""
    if b"<!DOCTYPE" in row:
        raise ValueError(f"{reading.name}: line {Lines(path).at(offset)} {DOCTYPE}")
    row = row.rstrip()
    too_long = len(row) > reading.max_row_bytes
    if not too_long and (parsed := _parsed(row)):
        return parsed[0]
    number = re.search(rb"""\sId\s*=\s*["'](-?\d{1,19})["']""", row[:HEAD_OF_ROW_BYTES])
    reason = f"over {reading.max_row_bytes} bytes" if too_long else _fault(row)
    reading.set_aside(reason, offset, number[1].decode() if number else None)
    return None


class _Target:
    """Collects the attributes of rows, and None for anything else inside the table: other elements, and text."""

    def __init__(self):
        self.found: list[dict[str, str] | None] = []
        self.depth = 0

    def start(self, tag, attributes):
        self.depth += 1
        if self.depth > 1:
            self.found.append(attributes if tag == "row" and self.depth == 2 else None)

    def data(self, text):
        if not text.isspace():
            self.found.append(None)

    def end(self, tag):
        self.depth -= 1

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
    for part in (b"<table>", rows_of_block, b"</table>"):
        parser.feed(part)
    return parser.close()


def _fault(row: bytes) -> str:
    try:
        _feed(row)
    except etree.XMLSyntaxError as error:
        return " ".join(str(error.msg).split()).removesuffix("(<string>, line 1)").strip()
    return "holds something other than one row"
