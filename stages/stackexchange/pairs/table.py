"""The pairs artifact: a folder a split, with part-00000.parquet, ... in it; a row is a pair, better answer first.

Columns as in lvwerra/stack-exchange-paired (metadata: url of the question, of the site, of the asker), the two scores,
and what CC BY-SA asks for: ids of the answers (their url is SITE/a/ID), authors, their pages and the licenses, each for
[question, response_j, response_k].
"""

import random
from collections.abc import Hashable, Iterable, Iterator
from itertools import takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SPLITS = ("finetune", "reward", "rl", "evaluation")
GROUP_PAIRS = 2000
GROUP_BYTES = 16 << 20
TEXTS = pa.list_(pa.string())
SCHEMA = pa.schema([
    ("qid", pa.int64()), ("site", pa.string()), ("question", pa.string()), ("response_j", pa.string()),
    ("response_k", pa.string()), ("score_j", pa.int64()), ("score_k", pa.int64()), ("date", pa.string()),
    ("metadata", TEXTS), ("answer_j", pa.int64()), ("answer_k", pa.int64()), ("authors", TEXTS),
    ("author_urls", TEXTS), ("licenses", TEXTS),
])


class Shard:
    """Writes one file of SCHEMA, with one row group in memory; written even when it stays empty."""

    def __init__(self, path: Path):
        self.writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self.held: list[pa.Table] = []

    def add(self, pairs: pa.Table) -> None:
        """Take in rows of SCHEMA."""
        self.held.append(pairs)
        if sum(map(len, self.held)) >= GROUP_PAIRS or sum(table.nbytes for table in self.held) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if table := pa.concat_tables([SCHEMA.empty_table(), *self.held]):
            self.writer.write_table(table.combine_chunks())
        self.held = []

    def close(self) -> None:
        self._flush()
        self.writer.close()


def rows_of(pairs: Path, split: str, columns: list[str] | None = None) -> Iterator[dict]:
    """The rows of one split as dictionaries, read group by group; ValueError when the table is missing."""
    files = sorted((Path(pairs) / split).glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{pairs} has no {split}/part-*.parquet: is it a pairs artifact?")
    for file in files:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()


def drawn_rows(rows: Iterable[dict], count: int, seed: int) -> list[dict]:
    """`count` rows, each set equally likely, in their order; no more are in memory (a reservoir, Vitter 1985)."""
    generator, held = random.Random(seed), []
    for number, row in enumerate(rows):
        if number < count:
            held.append((number, row))
        elif (place := generator.randrange(number + 1)) < count:
            held[place] = (number, row)
    return [row for _, row in sorted(held, key=lambda item: item[0])]


def answers_of(pairs: Path, split: str) -> Iterator[tuple[str, str]]:
    """Each (question, answer) of a split once, better and worse ones alike."""
    seen = set()
    for row in rows_of(pairs, split, ["site", "qid", "question", "response_j", "response_k"]):
        for answer in (row["response_j"], row["response_k"]):
            key = hash((row["site"], row["qid"], answer))
            if key not in seen:
                seen.add(key)
                yield row["question"], answer


def key_of(row: dict) -> tuple:
    """What names a row's question."""
    return row["site"], row["qid"]


def first_questions(pairs: Path, split: str, share: float, most: int) -> set[tuple]:
    """(site, qid) of the first questions of a split, as many as `share` of them, `most` at most.

    The posts stage has brought the questions into a random order: the first ones are a random choice.
    """
    found: dict[tuple, None] = {}
    for row in rows_of(pairs, split, ["site", "qid"]):
        found.setdefault(key_of(row))
    return set(list(found)[: min(most, int(share * len(found)))])


def first_rows(pairs: Path, split: str, questions: set[tuple]) -> Iterator[dict]:
    """The rows of what `first_questions` gave: those of a question stand together, so that no more need be read."""
    return takewhile(lambda row: key_of(row) in questions, rows_of(pairs, split))


def questions_of(pairs: Path, split: str) -> list[dict]:
    """Each question of a split once (the pairs repeat them), with its best answer: the row of its highest score_j."""
    return best_rows(rows_of(pairs, split))


def best_rows(rows: Iterable[dict]) -> list[dict]:
    """The row of the highest score_j of each question."""
    best: dict[tuple, dict] = {}
    for row in rows:
        key = key_of(row)
        if key not in best or row["score_j"] > best[key]["score_j"]:
            best[key] = row
    return [best[key] for key in sorted(best)]


def group_numbers(keys: Iterable[Hashable]) -> np.ndarray:
    """Equal keys to equal whole numbers [N], in order of first appearance."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(key, len(known)) for key in keys], dtype=np.int64)
