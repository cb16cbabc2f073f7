"""The two published tables, as local parquet or from the hub: pairs already drawn, or questions with scored answers.

    lvwerra/stack-exchange-paired                  qid, question, date, metadata, response_j, response_k  (Markdown)
    HuggingFaceH4/stack-exchange-preferences       qid, question, answers, date, metadata                 (HTML)

`metadata` is [url of the question, url of the site, url of its author]. Neither says votes, titles or tags.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from stages.runtime.progress import track
from stages.stackexchange.dump.xml_rows import Reading
from stages.stackexchange.questions.hash_order import question_keys_by_site
from stages.stackexchange.questions.sorted_runs import RECORD_ORDER, with_keys, write_sized
from stages.stackexchange.questions.spans import ScanTask
from stages.stackexchange.questions.table import SCHEMA, size_of

BATCH_ROWS = 1000
SPAN_BYTES = 32 << 20
LICENSE = "CC BY-SA 4.0"  # of the tables, as their cards say


@dataclass(frozen=True, kw_only=True)
class Records(ScanTask):
    """Some row groups of one parquet file, or all of a hub data set (`groups` is None)."""

    place: str
    groups: tuple[int, ...] | None
    bytes: int
    table = "records"


def parquet_files(place: str) -> list[Path]:
    """The file itself, or every parquet file below a folder, in the order of their paths."""
    path = Path(place)
    return sorted(path.rglob("*.parquet")) if path.is_dir() else [path]


def groups_of(file: Path) -> Iterator[tuple[tuple[int, ...], int]]:
    """(row groups, their bytes) in pieces of about SPAN_BYTES. ValueError when it is neither of the two tables."""
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid:
        raise ValueError(f"{file}: not a parquet file, or cut short; download it again") from None
    _shape(table.schema_arrow.names, str(file))
    held, size = [], 0
    for group in range(table.num_row_groups):
        held.append(group)
        size += table.metadata.row_group(group).total_byte_size
        if size >= SPAN_BYTES:
            yield tuple(held), size
            held, size = [], 0
    if held:
        yield tuple(held), size


def partition_records(work: Records) -> dict[str, int]:
    """Rows to runs of question records; returns what was counted. ValueError when a hub data set cannot be had."""
    return work.counted(work.place, 0, work.bytes if work.groups else 0, partial(_partition, work))


def _partition(work: Records, reading: Reading) -> None:
    for left in work.folder.glob(f"record*-{work.number:05d}-*"):
        left.unlink()
    rows, shape = _local(work) if work.groups is not None else _hub(work.place)
    for number, held in enumerate(_batches(_records(rows, shape, reading))):
        table, name = _table(held, work), f"{work.number:05d}-{number:05d}.arrow"
        runs = work.folder / f"records-{name}", work.folder / f"recordsizes-{name}"
        write_sized(*runs, table, RECORD_ORDER, work.parts)


def _local(work: Records) -> tuple[Iterator[dict], Callable[[dict], dict]]:
    table = pq.ParquetFile(work.place)
    batches = table.iter_batches(BATCH_ROWS, row_groups=list(work.groups))
    return (row for batch in batches for row in batch.to_pylist()), _shape(table.schema_arrow.names, work.place)


def _hub(place: str) -> tuple[Iterator[dict], Callable[[dict], dict]]:
    import datasets  # slow to import, and needed for hub ids only
    try:
        stream = iter(datasets.load_dataset(place, split="train", streaming=True))
        first = next(stream, None)
    except Exception as error:  # the hub client raises its own family of network, permission and format errors
        raise ValueError(f"{place}: no such file or folder, nor to be had from the hub: {_line(error)}") from None
    if first is None:
        raise ValueError(f"{place}: the data set is empty")
    return track(_chain(first, stream), f"read {place}", None, "rows"), _shape(first, place)


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _chain(first: dict, rest: Iterator[dict]) -> Iterator[dict]:
    yield first
    yield from rest


def _batches(records: Iterator[tuple[int, dict]]) -> Iterator[list[tuple[int, dict, int]]]:
    held, total = [], 0
    for number, record in records:
        held.append((number, record, size_of(record)))
        total += held[-1][-1]
        if total >= SPAN_BYTES:
            yield held
            held, total = [], 0
    if held:
        yield held


def _table(held: list[tuple[int, dict, int]], work: Records) -> pa.Table:
    """Records with their key: each site's questions have an order of their own."""
    numbers, records, sizes = zip(*held, strict=True)
    table = pa.Table.from_pylist(list(records), schema=SCHEMA)
    sites, ids = table["site"].to_pylist(), table["question_id"].to_numpy()
    more = {"number": np.array(numbers, dtype=np.int64) + (work.number << 40), "size": np.array(sizes, dtype=np.int64),
            "source": np.full(len(held), work.source, dtype=np.int32),
            "posts": pc.add(pc.list_value_length(table["answers"]), 1)}
    table = with_keys(table, question_keys_by_site(sites, work.seed, ids))
    return pa.table({name: table[name] for name in table.column_names} | more)


def _shape(columns: Iterable[str], place: str) -> Callable[[dict], dict]:
    columns = set(columns)
    for needed, shape in SHAPES:
        if needed <= columns:
            return shape
    raise ValueError(f"{place}: columns {', '.join(sorted(columns))}; expected qid, question, date, metadata, and "
                     f"response_j, response_k (stack-exchange-paired) or answers (stack-exchange-preferences)")


def _records(rows: Iterable[dict], shape: Callable[[dict], dict], reading: Reading) -> Iterator[tuple[int, dict]]:
    for number, row in enumerate(rows, 1):
        try:
            record = shape(row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reading.counts["rows_read"] += 1
            reading.set_aside(_line(error), number, str(row.get("qid")))
            reading.check_share()
            continue
        reading.counts["rows_read"] += 1 + len(record["answers"])  # a row a post, as in a dump
        yield number, record


def _from_paired(row: dict) -> dict:
    """A row is one question record with two answers, scored 1 (the better) and 0: their scores are not published."""
    answers = [_answer(0, _text(row["response_j"]), score=1), _answer(1, _text(row["response_k"]), score=0)]
    return _record(row, "markdown", answers)


def _from_preferences(row: dict) -> dict:
    """`pm_score` is the published score, `selected` the acceptance."""
    answers = [_answer(int(a["answer_id"]), _text(a["text"]), int(a["pm_score"]), a["author"] or "unknown",
                       a.get("author_profile") or "", bool(a["selected"])) for a in row["answers"]]
    return _record(row, "html", answers)


def _answer(number: int, text: str, score: int, author: str = "unknown", author_url: str = "",
            accepted: bool = False) -> dict:
    return {"id": number, "text": text, "author": author, "author_url": author_url, "license": LICENSE, "votes": None,
            "accepted": accepted, "score": score}


def _record(row: dict, markup: str, answers: list[dict]) -> dict:
    metadata = list(row["metadata"] or [])
    site = re.sub(r"^\w+://", "", metadata[1]).strip("/") if len(metadata) > 1 else "unknown"
    return {"question_id": int(row["qid"]), "site": site, "title": "", "question": _text(row["question"]),
            "markup": markup, "tags": [], "date": _text(row["date"]), "url": metadata[0] if metadata else "",
            "author": "unknown", "author_url": metadata[2] if len(metadata) > 2 else "", "license": LICENSE,
            "answers": answers}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is missing (found {value!r:.40})")
    return value


SHAPES = (({"qid", "question", "response_j", "response_k", "date", "metadata"}, _from_paired),
          ({"qid", "question", "answers", "date", "metadata"}, _from_preferences))
