"""Spans of a dump's tables to sorted runs: posts-, sizes- and claims-NUMBER.arrow, or votes-NUMBER.arrow."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.artifact import write_json
from stages.stackexchange.dump import xml_table
from stages.stackexchange.dump.xml_rows import Reading, rows
from stages.stackexchange.questions.hash_order import post_keys, question_keys
from stages.stackexchange.questions.sorted_runs import CLAIM_ORDER, POST_ORDER, with_keys, write_run, write_sized

SPAN_BYTES = 32 << 20
QUESTION, ANSWER = 1, 2
UP_VOTE = "2"
INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
LICENSES = (("2018-05-02", "CC BY-SA 3.0"), ("2011-04-08", "CC BY-SA 2.5"))  # until, name; 4.0 since
ROW_OVERHEAD_BYTES = 200
BATCH_ROWS = 2000
NUMBERS = ("Id", "PostTypeId", "ParentId", "Score", "AcceptedAnswerId", "OwnerUserId")
TEXTS = {"body": "Body", "title": "Title", "tags": "Tags", "date": "CreationDate", "author": "OwnerDisplayName"}


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """`source` is its place in the list of the run's sources, `parts` how many its runs are cut into."""

    number: int
    source: int
    parts: int
    folder: Path
    seed: int
    max_bad_rows_share: float

    @property
    def done(self) -> Path:
        return self.folder / f"done-{self.number:05d}.json"

    @property
    def quarantine(self) -> Path:
        return self.folder / f"quarantine-{self.number:05d}.jsonl"

    def counted(self, name: str, max_row_bytes: int, bytes_read: int, fill: Callable[[Reading], None]
                ) -> dict[str, int]:
        """What is counted while `fill` leaves the runs, now or when this was done before."""
        if self.done.exists():
            return json.loads(self.done.read_text())
        with open(self.quarantine, "w", encoding="utf-8") as quarantine:
            reading = Reading(name, quarantine, max_row_bytes, self.max_bad_rows_share)
            fill(reading)
        counts = dict(reading.counts) | {"bytes_read": bytes_read}
        write_json(self.done, counts)
        return counts


@dataclass(frozen=True, kw_only=True)
class Span(ScanTask):
    """Rows of one table of one site that stand next to each other."""

    name: str  # for messages
    site: str
    table: str  # "posts" or "votes"
    path: Path
    place: xml_table.Place
    max_row_bytes: int

    def file(self, kind: str) -> Path:
        """Of what this span leaves: "posts", "sizes", "claims" or "votes"."""
        return self.folder / f"{kind}-{self.number:05d}.arrow"


def partition(span: Span) -> dict[str, int]:
    """Read a span, leave its runs, return what was counted. ValueError as `rows`."""
    write = _partition_posts if span.table == "posts" else _partition_votes
    counts = span.counted(span.name, span.max_row_bytes, span.place.bytes, partial(write, span))
    pa.default_memory_pool().release_unused()  # or what spans leave behind adds up
    return counts


def _partition_posts(span: Span, reading: Reading) -> None:
    found = rows(span.path, span.place, reading)
    tables = [_posts([], [], reading)]
    while batch := list(islice(found, BATCH_ROWS)):  # a table is a fraction of the size of its rows
        tables.append(_posts(*zip(*batch, strict=True), reading))
    posts = pa.concat_tables(tables)
    posts = posts.append_column("source", _constant(span.source, len(posts)))
    claims = posts.select(["source", "id", "home", "offset"])
    claims = with_keys(claims, post_keys(span.site, span.seed, claims["id"].to_numpy()))
    write_run(span.file("claims"), claims, CLAIM_ORDER, span.parts)
    posts = with_keys(posts, question_keys(span.site, span.seed, posts["home"].to_numpy()))
    posts = posts.append_column("posts", _constant(1, len(posts)))
    write_sized(span.file("posts"), span.file("sizes"), posts, POST_ORDER, span.parts)


def _posts(offsets: Sequence[int], found: Sequence[dict[str, str]], reading: Reading) -> pa.Table:
    """Questions and answers; rows that cannot be used are set aside, wiki pages and other types counted."""
    number = {name: _integers([row.get(name) for row in found]) for name in NUMBERS}
    kind = number["PostTypeId"]
    home = pc.if_else(pc.equal(kind, ANSWER), number["ParentId"], number["Id"])
    named = pc.and_(pc.is_valid(kind), pc.is_valid(number["Id"]))
    other = pc.and_(named, pc.fill_null(pc.and_(pc.not_equal(kind, QUESTION), pc.not_equal(kind, ANSWER)), False))
    usable = pc.and_(named, pc.and_(pc.is_valid(home), pc.is_valid(number["Score"])))
    for at in pc.indices_nonzero(pc.invert(pc.or_(usable, other))).to_pylist():
        reading.set_aside(_fault(found[at]), offsets[at], found[at].get("Id"))
    if others := pc.sum(other).as_py():
        reading.counts["dropped: other post types"] += others
    text = {column: pa.array([row.get(name, "") for row in found], pa.string()) for column, name in TEXTS.items()}
    license = pa.array([row.get("ContentLicense") or None for row in found], pa.string())
    size = pc.add(pc.add(pc.binary_length(text["body"]), pc.binary_length(text["title"])), ROW_OVERHEAD_BYTES)
    posts = pa.table({"home": home, "kind": kind, "id": number["Id"], "offset": pa.array(offsets, pa.int64()),
                      "votes": number["Score"], "accepted": number["AcceptedAnswerId"], **text,
                      "user": number["OwnerUserId"], "license": pc.coalesce(license, _licenses(text["date"])),
                      "size": pc.cast(size, pa.int64())})
    return posts.filter(pc.and_not(usable, other))


def _integers(values: list[str | None]) -> pa.Array:
    """int64; null for what is no whole number."""
    texts = pa.array(values, pa.string())
    whole_number = pc.match_substring_regex(texts, rf"\A(?:{INTEGER.pattern})\z")
    return pc.cast(pc.if_else(whole_number, texts, None), pa.int64())


def _fault(row: dict[str, str]) -> str:
    """Why a row cannot be used; it cannot."""
    needed = ("PostTypeId", "Id", "Score", "ParentId")
    name = next(name for name in needed if not INTEGER.fullmatch(row.get(name, "")))
    text = row.get(name, "")
    return f"{name} is {text[:40]!r}, not a whole number" if text else f"no {name}"


def _licenses(dates: pa.Array) -> pa.Array:
    """Dumps before 2020 do not say: the terms of the day then (stackoverflow.com/help/licensing)."""
    found = pa.array(["CC BY-SA 4.0"] * len(dates), pa.string())
    for until, name in LICENSES:
        found = pc.if_else(pc.less(dates, until), name, found)
    return found


def _partition_votes(span: Span, reading: Reading) -> None:
    """Up votes of each post; other kinds of votes are read past."""
    ups: Counter = Counter()
    for offset, row in rows(span.path, span.place, reading):
        post = row.get("PostId", "")
        if not INTEGER.fullmatch(post):
            reading.set_aside(f"PostId is {post[:40]!r}, not a whole number", offset, row.get("Id"))
        elif row.get("VoteTypeId") == UP_VOTE:
            ups[int(post)] += 1
    table = pa.table({"source": _constant(span.source, len(ups)), "id": pa.array(ups.keys(), pa.int64()),
                      "ups": pa.array(ups.values(), pa.int64())})
    table = with_keys(table, post_keys(span.site, span.seed, table["id"].to_numpy()))
    write_run(span.file("votes"), table, ["key", "source", "id"], span.parts)


def _constant(value: int, length: int) -> pa.Array:
    return pa.array(np.full(length, value, dtype=np.int32))
