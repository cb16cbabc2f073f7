"""Read and write the pairs artifact: a folder per split with part-*.parquet; a row is a pair, better answer first.

The columns are those of lvwerra/stack-exchange-paired (metadata: urls of question, site and asker), the two scores, the
dates of the answers, and what CC BY-SA requires: ids of the answers (their url is SITE/a/ID), authors, their profiles
and the licences, each for [question, response_j, response_k].
"""

import json
import random
from collections.abc import Hashable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from stages.runtime.files import atomic_path
from stages.stackexchange.prompt import prompt_text

SPLITS = ("finetune", "reward", "rl", "evaluation")
GROUP_PAIRS = 2000
GROUP_BYTES = 16 << 20
TEXTS = pa.list_(pa.string())
DATES = ("date_j", "date_k")
SCHEMA = pa.schema([
    ("qid", pa.int64()), ("site", pa.string()), ("question", pa.string()), ("response_j", pa.string()),
    ("response_k", pa.string()), ("score_j", pa.int64()), ("score_k", pa.int64()), ("date", pa.string()),
    ("metadata", TEXTS), ("answer_j", pa.int64()), ("answer_k", pa.int64()), *((name, pa.string()) for name in DATES),
    ("authors", TEXTS), ("author_urls", TEXTS), ("licenses", TEXTS),
])

# What TRL calls a preference data set with an explicit prompt.
PREFERENCES = pa.schema([("prompt", pa.string()), ("chosen", pa.string()), ("rejected", pa.string())])


class PairsWriter:
    """Writes one file of SCHEMA, possibly empty, with one row group in memory."""

    def __init__(self, path: Path):
        self.writer = pq.ParquetWriter(path, SCHEMA, compression="zstd")
        self.tables: list[pa.Table] = []

    def add(self, pairs: pa.Table) -> None:
        """Add rows of SCHEMA."""
        self.tables.append(pairs)
        if sum(map(len, self.tables)) >= GROUP_PAIRS or sum(table.nbytes for table in self.tables) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if table := pa.concat_tables([SCHEMA.empty_table(), *self.tables]):
            self.writer.write_table(table.combine_chunks())
        self.tables = []

    def close(self) -> None:
        """Write the last row group and close the file."""
        self._flush()
        self.writer.close()


def read_pairs(pairs: Path, split: str, columns: list[str] | None = None) -> Iterator[dict]:
    """Yield the rows of one split, read batch by batch. Raises ValueError if the split is missing."""
    files = sorted((Path(pairs) / split).glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{pairs} has no {split}/part-*.parquet: is it a pairs artifact?")
    for file in files:
        with pq.ParquetFile(file) as table:
            for batch in table.iter_batches(columns=columns):
                yield from batch.to_pylist()


def count_pairs(pairs: Path, split: str) -> int:
    """Count the rows of one split; reads no row."""
    return sum(pq.read_metadata(file).num_rows for file in (Path(pairs) / split).glob("part-*.parquet"))


def sample_rows(rows: Iterable[dict], count: int, seed: int) -> list[dict]:
    """Draw `count` rows, uniformly and in their order; no more are in memory (reservoir sampling, Vitter 1985)."""
    generator, reservoir = random.Random(seed), []
    for number, row in enumerate(rows):
        if number < count:
            reservoir.append((number, row))
        elif (index := generator.randrange(number + 1)) < count:
            reservoir[index] = (number, row)
    return [row for _, row in sorted(reservoir, key=itemgetter(0))]


def space_evenly(rows: Sequence, count: int) -> list:
    """Select at most `count` of the rows, evenly spaced."""
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def read_answers(pairs: Path, split: str) -> Iterator[tuple[str, str]]:
    """Yield each (question, answer) of a split once, better and worse answers alike."""
    for row, answer, _ in read_scored_answers(pairs, split):
        yield row["question"], answer


def read_scored_answers(pairs: Path, split: str) -> Iterator[tuple[dict, str, int]]:
    """Yield (row, answer, score) of each answer of a split once; the row has site, qid and question."""
    keys = set()
    columns = ["site", "qid", "question", "response_j", "response_k", "score_j", "score_k"]
    for row in read_pairs(pairs, split, columns):
        for side in ("j", "k"):
            answer = row[f"response_{side}"]
            key = hash((row["site"], row["qid"], answer))
            if key not in keys:
                keys.add(key)
                yield row, answer, row[f"score_{side}"]


def question_key(row: dict) -> tuple:
    """Return (site, qid), which identify a row's question."""
    return row["site"], row["qid"]


def first_question_keys(pairs: Path, split: str, share: float, max_questions: int) -> set[tuple]:
    """Return the (site, qid) of the first `share` of a split's questions, at most `max_questions`.

    The posts stage shuffles the questions, so the first ones are a random sample.
    """
    keys: dict[tuple, None] = {}
    for row in read_pairs(pairs, split, ["site", "qid"]):
        keys.setdefault(question_key(row))
    return set(list(keys)[: min(max_questions, int(share * len(keys)))])


def read_first_rows(pairs: Path, split: str, questions: set[tuple]) -> Iterator[dict]:
    """Yield the rows of the questions from `first_question_keys`, and read no further."""
    return takewhile(lambda row: question_key(row) in questions, read_pairs(pairs, split))


def read_best_rows(pairs: Path, split: str) -> list[dict]:
    """Return one row per question of a split, the one with the highest score_j."""
    return best_rows(read_pairs(pairs, split))


def best_rows(rows: Iterable[dict]) -> list[dict]:
    """Return the row with the highest score_j of each question, sorted by site and qid."""
    best: dict[tuple, dict] = {}
    for row in rows:
        key = question_key(row)
        if key not in best or row["score_j"] > best[key]["score_j"]:
            best[key] = row
    return [best[key] for key in sorted(best)]


def group_numbers(keys: Iterable[Hashable]) -> np.ndarray:
    """Number the distinct keys in order of first appearance, and return each key's number, [N]."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int64)


def export_preferences(pairs: Path, split: str, out: Path) -> int:
    """Write one split as `prompt, chosen, rejected` to a new .parquet or .jsonl file; return the number of pairs.

    The prompt is the very text that every stage trains on. An answer has no EOS: TRL adds it. Raises ValueError for
    a name that cannot be written.
    """
    if out.suffix not in (".parquet", ".jsonl"):
        raise ValueError(f"--out {out}: give a name that ends in .parquet or .jsonl")
    if out.exists():
        raise ValueError(f"--out {out} exists already: give another name, or delete it")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    rows = ({"prompt": prompt_text(row["question"]), "chosen": row["response_j"], "rejected": row["response_k"]}
            for row in read_pairs(pairs, split, ["question", "response_j", "response_k"]))
    with atomic_path(out) as draft:
        if out.suffix == ".jsonl":
            with open(draft, "w", encoding="utf-8") as stream:
                stream.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            with pq.ParquetWriter(draft, PREFERENCES, compression="zstd") as writer:
                while group := list(islice(rows, GROUP_PAIRS)):
                    writer.write_table(pa.Table.from_pylist(group, schema=PREFERENCES))
    return count_pairs(pairs, split)
