"""The posts artifact: question records with their scored answers, in part-00000.parquet, part-00001.parquet, ...

votes: net (up minus down), null where the source does not say. score: see stages/text/scoring.py.
"""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.plumbing.progress import Progress

ROW_GROUP_QUESTIONS = 1000
BATCH_QUESTIONS = 200
ANSWER = pa.struct([("id", pa.int64()), ("text", pa.string()), ("author", pa.string()), ("votes", pa.int64()),
                    ("accepted", pa.bool_()), ("score", pa.int64())])
SCHEMA = pa.schema([
    ("question_id", pa.int64()), ("site", pa.string()), ("title", pa.string()),
    ("question", pa.string()), ("markup", pa.string()),  # the raw body; "html" or "markdown"
    ("tags", pa.list_(pa.string())), ("date", pa.string()), ("url", pa.string()), ("author", pa.string()),
    ("license", pa.string()), ("answers", pa.list_(ANSWER)),
])


def read(posts: Path) -> Iterator[dict]:
    """Every record of SCHEMA, in order, in flat memory. ValueError when the folder holds none of the files."""
    files = sorted(posts.glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{posts}: no part-*.parquet here; give the folder that stages.posts made")
    progress = Progress("questions", sum(pq.read_metadata(file).num_rows for file in files), "questions")
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(BATCH_QUESTIONS):
            for question in batch.to_pylist():
                yield question
                progress.advance()
    progress.finish()


class Parts:
    """Writes records of SCHEMA, `questions_per_part` a file, with one row group in memory."""

    def __init__(self, folder: Path, questions_per_part: int):
        self.folder, self.limit = folder, questions_per_part
        self.held: list[dict] = []
        self.writer: pq.ParquetWriter | None = None
        self.number = self.in_part = 0

    def add(self, question: dict) -> None:
        """Take in one record."""
        self.held.append(question)
        self.in_part += 1
        if len(self.held) == ROW_GROUP_QUESTIONS or self.in_part == self.limit:
            self._flush()
        if self.in_part == self.limit:
            self._close_part()

    def _flush(self) -> None:
        if self.writer is None:
            self.writer = pq.ParquetWriter(self.folder / f"part-{self.number:05d}.parquet", SCHEMA, compression="zstd")
        self.writer.write_table(pa.Table.from_pylist(self.held, schema=SCHEMA))
        self.held = []

    def _close_part(self) -> None:
        self.writer.close()
        self.writer, self.number, self.in_part = None, self.number + 1, 0

    def __enter__(self) -> "Parts":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self.held and not error:
            self._flush()
        if self.writer:
            self._close_part()
