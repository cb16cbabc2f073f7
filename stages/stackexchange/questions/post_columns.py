"""Convert the attributes of a dump's rows to typed columns: questions and answers, or upvotes."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.stackexchange.dump.scan_log import ScanLog

QUESTION, ANSWER = 1, 2
UPVOTE = "2"
INTEGER = re.compile(r"-?[0-9]{1,18}", re.ASCII)
LICENSES = (("2018-05-02", "CC BY-SA 3.0"), ("2011-04-08", "CC BY-SA 2.5"))  # until, name; 4.0 since
UNKNOWN_LICENSE = "unknown"
DATE = r"\A\d{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|[12]\d|3[01])(?:T|\z)"
ROW_OVERHEAD_BYTES = 200
NUMBERS = ("Id", "PostTypeId", "ParentId", "Score", "AcceptedAnswerId", "OwnerUserId")
TEXTS = {"body": "Body", "title": "Title", "tags": "Tags", "date": "CreationDate", "author": "OwnerDisplayName"}

# Posts that nobody wrote, by name: made-up ones that mark the dumps of June 2025 (the ids are the same on every site;
# meta.stackexchange.com/q/412018), and those of Stack Exchange's Answer Bot.
WATERMARKS, ANSWER_BOT = "watermark posts", "Answer Bot posts"
EXCLUSIONS: dict[str, Callable[[dict[str, pa.Array]], pa.Array]] = {
    WATERMARKS: lambda number: pc.is_in(number["Id"], pa.array([1_000_000_001, 1_000_000_010])),
    ANSWER_BOT: lambda number: pc.equal(number["OwnerUserId"], -2),
}


def post_columns(offsets: Sequence[int], rows: Sequence[dict[str, str]], log: ScanLog, exclude: Iterable[str] = ()
                 ) -> pa.Table:
    """Build a table of the questions and answers; set bad rows aside and count other post types as dropped.

    exclude: names in EXCLUSIONS of posts that are dropped, too, and counted under that name.
    """
    number = {name: _integers([row.get(name) for row in rows]) for name in NUMBERS}
    kind = number["PostTypeId"]
    question_id = pc.if_else(pc.equal(kind, ANSWER), number["ParentId"], number["Id"])
    has_kind_and_id = pc.and_(pc.is_valid(kind), pc.is_valid(number["Id"]))
    is_other = pc.fill_null(pc.and_(pc.not_equal(kind, QUESTION), pc.not_equal(kind, ANSWER)), False)
    is_other = pc.and_(has_kind_and_id, is_other)
    is_usable = pc.and_(has_kind_and_id, pc.and_(pc.is_valid(question_id), pc.is_valid(number["Score"])))
    for index in pc.indices_nonzero(pc.invert(pc.or_(is_usable, is_other))).to_pylist():
        log.set_aside(_describe_fault(rows[index]), offsets[index], rows[index].get("Id"))
    if others := pc.sum(is_other).as_py():
        log.counts["dropped: other post types"] += others
    text = {column: pa.array([row.get(name, "") for row in rows], pa.string()) for column, name in TEXTS.items()}
    license = pa.array([row.get("ContentLicense") or None for row in rows], pa.string())
    size = pc.add(pc.add(pc.binary_length(text["body"]), pc.binary_length(text["title"])), ROW_OVERHEAD_BYTES)
    posts = pa.table({"question_id": question_id, "kind": kind, "id": number["Id"],
                      "offset": pa.array(offsets, pa.int64()), "votes": number["Score"],
                      "accepted": number["AcceptedAnswerId"], **text, "user": number["OwnerUserId"],
                      "license": pc.coalesce(license, _licenses(text["date"])), "size": pc.cast(size, pa.int64())})
    is_kept = pc.and_not(is_usable, is_other)
    for name in exclude:
        is_excluded = pc.and_(is_kept, pc.fill_null(EXCLUSIONS[name](number), False))
        if count := pc.sum(is_excluded).as_py():
            log.counts[f"dropped: {name}"] += count
        is_kept = pc.and_not(is_kept, is_excluded)
    return posts.filter(is_kept)


def upvote_columns(rows: Iterable[tuple[int, dict[str, str]]], log: ScanLog) -> pa.Table:
    """Build a table of the upvotes of each post id; other kinds of votes are skipped."""
    upvotes: Counter = Counter()
    for offset, row in rows:
        post_id = row.get("PostId", "")
        if not INTEGER.fullmatch(post_id):
            log.set_aside(f"PostId is {post_id[:40]!r}, not a whole number", offset, row.get("Id"))
        elif row.get("VoteTypeId") == UPVOTE:
            upvotes[int(post_id)] += 1
    return pa.table({"id": pa.array(upvotes.keys(), pa.int64()), "upvotes": pa.array(upvotes.values(), pa.int64())})


def constant_column(value: int, length: int) -> pa.Array:
    """Build a column of equal 32-bit integers."""
    return pa.array(np.full(length, value, dtype=np.int32))


def _integers(values: list[str | None]) -> pa.Array:
    """Convert to int64; what is not a whole number becomes null."""
    texts = pa.array(values, pa.string())
    is_integer = pc.match_substring_regex(texts, rf"\A(?:{INTEGER.pattern})\z")
    return pc.cast(pc.if_else(is_integer, texts, None), pa.int64())


def _describe_fault(row: dict[str, str]) -> str:
    """Say why a row cannot be used."""
    required = ("PostTypeId", "Id", "Score", "ParentId")
    name = next(name for name in required if not INTEGER.fullmatch(row.get(name, "")))
    text = row.get(name, "")
    return f"{name} is {text[:40]!r}, not a whole number" if text else f"no {name}"


def _licenses(dates: pa.Array) -> pa.Array:
    """Return the licence of the day, for dumps before 2020, which have none (stackoverflow.com/help/licensing).

    Of a date that cannot be read no licence follows.
    """
    names = pa.array(["CC BY-SA 4.0"] * len(dates), pa.string())
    for until, name in LICENSES:
        names = pc.if_else(pc.less(dates, until), name, names)
    return pc.if_else(pc.match_substring_regex(dates, DATE), names, UNKNOWN_LICENSE)
