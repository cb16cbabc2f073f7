"""Read the two published tables, as local Parquet files or from the Hub, to question records.

    lvwerra/stack-exchange-paired                  qid, question, date, metadata, response_j, response_k  (Markdown)
    HuggingFaceH4/stack-exchange-preferences       qid, question, answers, date, metadata                 (HTML)

`metadata` is [url of the question, url of the site, url of its author]. Neither table has votes, titles, tags or
dates of answers.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.runtime.progress import track
from stages.stackexchange.dump.scan_log import ScanLog
from stages.stackexchange.questions.table import group_by_size

BATCH_ROWS = 1000
LICENSE = "CC BY-SA 4.0"  # of the tables, as their cards say
Convert = Callable[[dict], dict]  # a row of the table to a question record


def list_parquet_files(path: Path) -> list[Path]:
    """List the file itself, or every Parquet file below a folder, sorted by path."""
    return sorted(path.rglob("*.parquet")) if path.is_dir() else [path]


def split_row_groups(file: Path, span_bytes: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Split a file into spans of about `span_bytes`: yield (numbers of row groups, their bytes).

    Raises ValueError if it is neither of the two tables.
    """
    try:
        table = pq.ParquetFile(file)
    except pa.ArrowInvalid:
        raise ValueError(f"{file}: not a parquet file, or cut short; download it again") from None
    _select_conversion(table.schema_arrow.names, str(file))
    numbers = range(table.num_row_groups)
    for groups, size_bytes in group_by_size(
            numbers, lambda number: table.metadata.row_group(number).total_byte_size, span_bytes):
        yield tuple(groups), size_bytes


def read_records(name: str, row_groups: tuple[int, ...] | None, log: ScanLog) -> Iterator[tuple[int, dict]]:
    """Yield (number of the row, question record) from row groups of a file, or from all of a Hub data set (None).

    A row that cannot be used is set aside. Raises ValueError if the data set cannot be read.
    """
    rows, convert = _open_hub(name) if row_groups is None else _open_file(name, row_groups)
    for number, row in enumerate(rows, 1):
        try:
            record = convert(row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            log.counts["rows_read"] += 1
            log.set_aside(_one_line(error), number, str(row.get("qid")))
            continue
        log.counts["rows_read"] += 1 + len(record["answers"])  # one per post, as in a dump
        yield number, record


def _open_file(name: str, row_groups: tuple[int, ...]) -> tuple[Iterator[dict], Convert]:
    table = pq.ParquetFile(name)
    batches = table.iter_batches(BATCH_ROWS, row_groups=list(row_groups))
    return (row for batch in batches for row in batch.to_pylist()), _select_conversion(table.schema_arrow.names, name)


def _open_hub(name: str) -> tuple[Iterator[dict], Convert]:
    import datasets  # slow to import, and only needed here
    try:
        stream = iter(datasets.load_dataset(name, split="train", streaming=True))
        first = next(stream, None)
    except Exception as error:  # the Hub client raises its own family of network, permission and format errors
        raise ValueError(f"{name}: no such file or folder, and it cannot be loaded from the hub; check its name and "
                         f"the network: {_one_line(error)}") from None
    if first is None:
        raise ValueError(f"{name}: the data set is empty")
    return track(chain([first], stream), f"posts: read {name}", None, "rows"), _select_conversion(first, name)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _select_conversion(columns: Iterable[str], name: str) -> Convert:
    columns = set(columns)
    for required, convert in CONVERSIONS:
        if required <= columns:
            return convert
    raise ValueError(f"{name}: columns {', '.join(sorted(columns))}; expected qid, question, date, metadata, and "
                     f"response_j, response_k (stack-exchange-paired) or answers (stack-exchange-preferences)")


def _convert_paired(row: dict) -> dict:
    """Convert a pair to a question with two answers, scored 1 (the better) and 0: the scores are not published."""
    answers = [_answer(0, _text(row["response_j"]), score=1), _answer(1, _text(row["response_k"]), score=0)]
    return _record(row, "markdown", answers)


def _convert_preferences(row: dict) -> dict:
    """Convert a question. `pm_score` is the published score, `selected` the acceptance."""
    answers = [_answer(int(a["answer_id"]), _text(a["text"]), int(a["pm_score"]), a["author"] or "unknown",
                       a.get("author_profile") or "", bool(a["selected"])) for a in row["answers"]]
    return _record(row, "html", answers)


def _answer(answer_id: int, text: str, score: int, author: str = "unknown", author_url: str = "",
            accepted: bool = False) -> dict:
    return {"id": answer_id, "text": text, "author": author, "author_url": author_url, "license": LICENSE,
            "date": "", "votes": None, "accepted": accepted, "score": score}


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


CONVERSIONS = (({"qid", "question", "response_j", "response_k", "date", "metadata"}, _convert_paired),
               ({"qid", "question", "answers", "date", "metadata"}, _convert_preferences))
