"""Read the tables of a pairs artifact."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as parquet

SPLITS = ("finetune", "reward", "rl", "evaluation")


def rows_of(pairs: Path, split: str, columns: list[str] | None = None) -> Iterator[dict]:
    """The rows of one split as dictionaries, read group by group; ValueError when the table is missing."""
    path = Path(pairs) / f"{split}.parquet"
    if not path.is_file():
        raise ValueError(f"{pairs} has no {split}.parquet: is it a pairs artifact?")
    with parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(columns=columns):
            yield from batch.to_pylist()


def answers_of(pairs: Path, split: str) -> Iterator[tuple[str, str]]:
    """Each (question, answer) of a split once, better and worse ones alike."""
    seen = set()
    for row in rows_of(pairs, split, ["site", "qid", "question", "response_j", "response_k"]):
        for answer in (row["response_j"], row["response_k"]):
            key = hash((row["site"], row["qid"], answer))
            if key not in seen:
                seen.add(key)
                yield row["question"], answer


def questions_of(pairs: Path, split: str) -> list[dict]:
    """Each question of a split once (the pairs repeat them), with its best answer: the row of its highest score_j."""
    best: dict[tuple, dict] = {}
    for row in rows_of(pairs, split):
        key = (row["site"], row["qid"])
        if key not in best or row["score_j"] > best[key]["score_j"]:
            best[key] = row
    return [best[key] for key in sorted(best)]
