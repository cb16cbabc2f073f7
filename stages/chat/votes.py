"""Save a person's votes as preference pairs, in a folder like a pairs artifact that grows by a file per vote.

`reward/part-*.parquet` are the votes, better answer first, with the columns and types of the pairs artifact;
`ties/part-*.parquet` are the ties (both scores 0). `authors` names the author of the question, then the two models. The
fourth entry of `metadata` is JSON: the time, the settings of sampling, and for each answer the model's digest, its
reward and whether it ended by itself.

The folder is not an artifact: it has no manifest, which the next vote would make wrong. A stage that reads it records
the digest of its files.
"""

import hashlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq

from stages.chat.views import Answer
from stages.runtime.files import atomic_path
from stages.stackexchange.pairs.table import SCHEMA, question_key, read_pairs

VOTES, TIES = "reward", "ties"  # folders; the reward stage reads the split `reward`
TYPED = "typed"  # site of a question that is not from the pairs


class Comparison(NamedTuple):
    """Two answers to one question, in the order in which they are shown.

    row: of the question in the pairs table, None for one that was typed. sampling: settings of both answers.
    """

    question: str
    row: dict | None
    answers: list[Answer]
    sampling: dict


class Votes:
    """The folder of votes, created by the first one; several pages and processes may add votes at once."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def add(self, comparison: Comparison, choice: int | None) -> Path:
        """Save which answer is better (0 or 1; None: a tie), flushed to disk; return the folder."""
        folder = self.folder / (TIES if choice is None else VOTES)
        folder.mkdir(parents=True, exist_ok=True)
        row = build_row(comparison, choice)
        with atomic_path(folder / f"part-{time.time_ns()}-{uuid4().hex[:8]}.parquet", sync=True) as draft:
            pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), draft, compression="zstd")
        return folder

    def count(self, better: tuple[str, str], worse: tuple[str, str]) -> tuple[list[float], int]:
        """Return 1, 0.5 (a tie) or 0 for each vote between two models, and the number of its questions.

        better, worse: (policy, digest of the model). Raises ValueError for a file that holds no votes.
        """
        values, questions = [], set()
        for kind in (VOTES, TIES):
            for row in self._read(kind):
                models = parse_models(row)
                if set(models) == {better, worse}:
                    values.append(0.5 if kind == TIES else float(models[0] == better))
                    questions.add(question_key(row))  # votes on one question are not independent
        return values, len(questions)

    def _read(self, kind: str) -> list[dict]:
        if not (self.folder / kind).is_dir():
            return []
        try:
            return list(read_pairs(self.folder, kind, ["qid", "site", "metadata"]))
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{self.folder / kind} has a file that cannot be read ({error}): move it away") from None


def build_row(comparison: Comparison, choice: int | None) -> dict:
    """Build a row of SCHEMA, better answer first; a typed question's id is a hash of its text."""
    better, worse = comparison.answers[::-1] if choice == 1 else comparison.answers
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    vote = {"voted": now, **comparison.sampling, "j": _describe(better), "k": _describe(worse)}
    row = comparison.row or {
        "qid": int.from_bytes(hashlib.sha256(comparison.question.encode()).digest()[:7]), "site": TYPED}
    metadata = [*(row.get("metadata") or []), "", "", ""][:3]
    authors, urls, licenses = ((row.get(name) or [""])[:1] for name in ("authors", "author_urls", "licenses"))
    # No ids and dates of the answers: they are not posts.
    return {"qid": row["qid"], "site": row["site"], "question": comparison.question, "date": now,
            "response_j": better.text, "response_k": worse.text, "score_j": int(choice is not None), "score_k": 0,
            "metadata": [*metadata, json.dumps(vote, ensure_ascii=False)],
            "authors": [*authors, better.policy, worse.policy], "author_urls": [*urls, "", ""],
            "licenses": [*licenses, "", ""]}


def parse_models(row: dict) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return (policy, digest of the model) of the better and the worse answer; ValueError if the row is not a vote."""
    try:
        vote = json.loads(row["metadata"][3])
        return tuple((vote[side]["policy"], vote[side]["model"]) for side in "jk")
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError("a row among the votes is not a vote: keep pairs of other sources in another folder") from None


def _describe(answer: Answer) -> dict:
    return {"policy": answer.policy, "model": answer.model, "reward": answer.rewards[0], "ended": answer.ended}
