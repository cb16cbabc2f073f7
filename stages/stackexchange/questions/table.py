"""The posts artifact: question records with their scored answers, in part-00000.parquet, part-00001.parquet, ...

votes: net (up minus down), or up votes where these were asked for; null where the source does not say. score: see
stages/stackexchange/questions/scoring.py.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

GROUP_QUESTIONS = 500
BATCH_QUESTIONS = 200
GROUP_CHARACTERS = 16 << 20
ANSWER = pa.struct([("id", pa.int64()), ("text", pa.string()), ("author", pa.string()), ("author_url", pa.string()),
                    ("license", pa.string()), ("votes", pa.int64()), ("accepted", pa.bool_()), ("score", pa.int64())])
SCHEMA = pa.schema([
    ("question_id", pa.int64()), ("site", pa.string()), ("title", pa.string()),
    ("question", pa.string()), ("markup", pa.string()),  # the raw body; "html" or "markdown"
    ("tags", pa.list_(pa.string())), ("date", pa.string()), ("url", pa.string()), ("author", pa.string()),
    ("author_url", pa.string()), ("license", pa.string()), ("answers", pa.list_(ANSWER)),
])


def parts_of(posts: Path) -> list[Path]:
    """The files, in order. ValueError when the folder holds none."""
    files = sorted(posts.glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{posts}: no part-*.parquet here; give the folder that stages.posts made")
    return files


def questions_in(part: Path) -> Iterator[dict]:
    """Records of one file, in flat memory."""
    for batch in pq.ParquetFile(part).iter_batches(BATCH_QUESTIONS):
        yield from batch.to_pylist()


def tags_of(posts: Path, among: set[tuple]) -> dict[tuple, list[str]]:
    """The tags of each (site, question_id) wanted that is there."""
    columns = ["site", "question_id", "tags"]
    rows = (row for part in parts_of(posts) for batch in pq.ParquetFile(part).iter_batches(columns=columns)
            for row in batch.to_pylist())
    return {key: row["tags"] for row in rows if (key := (row["site"], row["question_id"])) in among}


def size_of(question: dict) -> int:
    """Characters of a record's texts."""
    return len(question["question"]) + sum(len(answer["text"]) for answer in question["answers"])


def write_part(path: Path, questions: Iterable[dict]) -> None:
    """Write records of SCHEMA to one file; memory holds one row group of GROUP_QUESTIONS or GROUP_CHARACTERS."""
    held, characters = [], 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for question in questions:
            held.append(question)
            characters += size_of(question)
            if len(held) == GROUP_QUESTIONS or characters >= GROUP_CHARACTERS:
                writer.write_table(pa.Table.from_pylist(held, schema=SCHEMA))
                held, characters = [], 0
        if held:
            writer.write_table(pa.Table.from_pylist(held, schema=SCHEMA))
