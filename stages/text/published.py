"""The two published tables, as local parquet or from the hub: pairs already drawn, or questions with scored answers.

    lvwerra/stack-exchange-paired                  qid, question, date, metadata, response_j, response_k  (Markdown)
    HuggingFaceH4/stack-exchange-preferences       qid, question, answers, date, metadata                 (HTML)

`metadata` is [url of the question, url of the site, url of its author]. Neither says votes, titles or tags.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.plumbing.progress import Progress
from stages.text.rows import Reading

BATCH_ROWS = 1000
LICENSE = "CC BY-SA 4.0"  # of the tables, as their cards say


def parquet_files(place: str) -> list[Path]:
    """The file itself, or every parquet file below a folder, in the order of their paths."""
    path = Path(place)
    return sorted(path.rglob("*.parquet")) if path.is_dir() else [path]


def local_questions(place: str, reading: Reading) -> Iterator[dict]:
    """Question records (schema: stages/posts.py) of a local copy. ValueError when it is neither of the two tables."""
    files = parquet_files(place)
    progress = Progress(f"read {place}", sum(f.stat().st_size for f in files), "bytes")
    for file in files:
        try:
            table = pq.ParquetFile(file)
        except pa.ArrowInvalid:
            raise ValueError(f"{file}: not a parquet file, or cut short; download it again") from None
        yield from _records(_rows(table), _shape(table.schema_arrow.names, str(file)), reading)
        progress.advance(file.stat().st_size)
        reading.counts["bytes_read"] += file.stat().st_size
    progress.finish()
    reading.check_share()


def hub_questions(place: str, reading: Reading) -> Iterator[dict]:
    """Question records of a hub data set, streamed. ValueError when it cannot be had, or is neither table."""
    import datasets  # slow to import, and needed for hub ids only
    try:
        stream = iter(datasets.load_dataset(place, split="train", streaming=True))
        first = next(stream, None)
    except Exception as error:  # the hub client raises its own family of network, permission and format errors
        raise ValueError(f"{place}: no such file or folder, nor to be had from the hub: {_line(error)}") from None
    if first is None:
        raise ValueError(f"{place}: the data set is empty")
    progress = Progress(f"read {place}", None, "rows")
    for record in _records(_chain(first, stream), _shape(first, place), reading):
        yield record
        progress.advance()
    progress.finish()
    reading.check_share()


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _chain(first: dict, rest: Iterator[dict]) -> Iterator[dict]:
    yield first
    yield from rest


def _rows(table: pq.ParquetFile) -> Iterator[dict]:
    for batch in table.iter_batches(BATCH_ROWS):
        yield from batch.to_pylist()


def _shape(columns: Iterable[str], place: str) -> Callable[[dict], dict]:
    columns = set(columns)
    for needed, shape in SHAPES:
        if needed <= columns:
            return shape
    raise ValueError(f"{place}: columns {', '.join(sorted(columns))}; expected qid, question, date, metadata, and "
                     f"response_j, response_k (stack-exchange-paired) or answers (stack-exchange-preferences)")


def _records(rows: Iterable[dict], shape: Callable[[dict], dict], reading: Reading) -> Iterator[dict]:
    for number, row in enumerate(rows, 1):
        try:
            record = shape(row)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reading.counts["rows_read"] += 1
            reading.set_aside(_line(error), number, str(row.get("qid")))
            continue
        reading.counts["rows_read"] += 1 + len(record["answers"])  # a row a post, as in a dump
        yield record


def _from_paired(row: dict) -> dict:
    """A row is one question record with two answers, scored 1 (the better) and 0: their scores are not published."""
    answers = [_answer(0, _text(row["response_j"]), score=1), _answer(1, _text(row["response_k"]), score=0)]
    return _record(row, "markdown", answers)


def _from_preferences(row: dict) -> dict:
    """`pm_score` is the published score, `selected` the acceptance."""
    answers = [_answer(int(a["answer_id"]), _text(a["text"]), int(a["pm_score"]), a["author"] or "unknown",
                       bool(a["selected"])) for a in row["answers"]]
    return _record(row, "html", answers)


def _answer(number: int, text: str, score: int, author: str = "unknown", accepted: bool = False) -> dict:
    return {"id": number, "text": text, "author": author, "votes": None, "accepted": accepted, "score": score}


def _record(row: dict, markup: str, answers: list[dict]) -> dict:
    metadata = list(row["metadata"] or [])
    site = re.sub(r"^\w+://", "", metadata[1]).strip("/") if len(metadata) > 1 else "unknown"
    return {"question_id": int(row["qid"]), "site": site, "title": "", "question": _text(row["question"]),
            "markup": markup, "tags": [], "date": _text(row["date"]), "url": metadata[0] if metadata else "",
            "author": metadata[2] if len(metadata) > 2 else "unknown", "license": LICENSE, "answers": answers}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"text is missing (found {value!r:.40})")
    return value


SHAPES = (({"qid", "question", "response_j", "response_k", "date", "metadata"}, _from_paired),
          ({"qid", "question", "answers", "date", "metadata"}, _from_preferences))
