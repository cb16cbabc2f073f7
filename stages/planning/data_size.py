"""Estimate how much text a run has, from a finished pairs artifact or from the size of the dump."""

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from stages.stackexchange.pairs.table import count_pairs, question_key, read_pairs

CHARACTERS_PER_TOKEN = 4  # of English and code in a large vocabulary; an assumption
SAMPLE_ROWS = 2000  # questions are shuffled, so the first rows are a random sample
DUMP_BYTES_PER_TOKEN = 8  # of Posts.xml, for each token of pairs: half of it is other columns; an assumption
COMPRESSION = {".7z": 6, ".gz": 5, ".zst": 5, ".parquet": 2}  # of a file's text, roughly


class DataSize(NamedTuple):
    """Tokens of the finetune split, pairs of the reward split, questions of the rl split; None: not known."""

    finetune_tokens: int | None = None
    reward_pairs: int | None = None
    rl_questions: int | None = None


def measure_pairs(pairs: Path) -> DataSize:
    """Count the rows of a pairs artifact, and estimate what they hold from the first of each split."""
    rows = list(islice(read_pairs(pairs, "finetune", ["question", "response_j"]), SAMPLE_ROWS))
    characters = sum(len(row["question"]) + len(row["response_j"]) for row in rows)
    keys = [question_key(row) for row in islice(read_pairs(pairs, "rl", ["site", "qid"]), SAMPLE_ROWS)]
    return DataSize(
        round(count_pairs(pairs, "finetune") * characters / CHARACTERS_PER_TOKEN / max(len(rows), 1)),
        count_pairs(pairs, "reward"), round(count_pairs(pairs, "rl") * len(set(keys)) / max(len(keys), 1)))


def measure_dump(files: Sequence[str], finetune_share: float) -> DataSize:
    """Estimate the tokens of the finetune split from the sizes of the dump's files; none are known without a file.

    finetune_share: of the questions.
    """
    text_bytes = sum(path.stat().st_size * COMPRESSION.get(path.suffix.lower(), 1) for path in map(Path, files)
                     if path.is_file())
    return DataSize(round(text_bytes * finetune_share / DUMP_BYTES_PER_TOKEN) or None)
