"""A person's votes as pairs: a folder in the form of a pairs artifact that grows by one row at a time.

`reward/part-00000.parquet` holds the votes, the better answer first, with the columns and types of the pairs artifact;
`ties/part-00000.parquet`, apart from them, what was called a tie (both scores 0). The folder is not an artifact: it has
no manifest, for one would be wrong after the next vote. A stage that reads it notes the digest of its files.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.runtime.files import atomic_path, write_text
from stages.stackexchange.pairs.table import SCHEMA

VOTES, TIES = "reward", "ties"  # folders; the reward stage reads the split of the first one's name
PART, LOCK = "part-00000.parquet", ".lock"
TYPED = "typed"  # site of a question that is none of the held-out ones
CARD = """---
pretty_name: Votes on answers of language models
configs:
- config_name: default
  data_files:
{files}---

# Votes on answers of language models

A person saw two answers to a question, not knowing whose they were, and chose the better one: `response_j`. Both are by
language models, named in `authors` after who asked. The fourth entry of `metadata` is JSON: when, at which
temperature and length, and of each answer the model's digest, its reward and whether it ended by itself.

`ties` holds what was called a tie, or both bad; a reward model cannot learn from it.

Many of the questions are from the evaluation split: who trains on these votes has no longer held them out.
"""


@dataclass(frozen=True)
class Written:
    """An answer as it is voted on. model: a digest that names what wrote it, or ''; ended: by itself, not cut off."""

    policy: str
    model: str
    text: str
    reward: float | None
    ended: bool

    def about(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "text"}


@dataclass(frozen=True)
class Question:
    """As asked; row: that of the pairs table which it is from, or None."""

    text: str
    row: dict | None = None

    def columns(self) -> dict:
        """What the pairs table says of the question; a typed one is named by a hash of its text."""
        row = self.row
        if row is None:
            qid = int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:7])
            return {"qid": qid, "site": TYPED, "question": self.text, "metadata": ["", "", ""],
                    "authors": [""], "author_urls": [""], "licenses": [""]}
        return {"qid": row["qid"], "site": row["site"], "question": self.text, "metadata": list(row["metadata"] or []),
                **{name: list(row.get(name) or [""])[:1] for name in ("authors", "author_urls", "licenses")}}


def vote_row(question: Question, better: Written, worse: Written, how: dict, tie: bool = False) -> dict:
    """A row of SCHEMA; how: the settings that both answers were drawn with."""
    asked, now = question.columns(), datetime.now(UTC).isoformat(timespec="milliseconds")
    told = json.dumps({"voted": now, **how, "j": better.about(), "k": worse.about()}, ensure_ascii=False)
    return {**asked, "response_j": better.text, "response_k": worse.text, "score_j": 0 if tie else 1, "score_k": 0,
            "date": now, "metadata": [*asked["metadata"][:3], *[""] * (3 - len(asked["metadata"])), told],
            "answer_j": None, "answer_k": None,  # no posts: they have no numbers
            "authors": [*asked["authors"], better.policy, worse.policy],
            "author_urls": [*asked["author_urls"], "", ""], "licenses": [*asked["licenses"], "", ""]}


class Votes:
    """The folder of votes; made with the first one. Any number of pages may add to it at once."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def add(self, kind: str, row: dict) -> None:
        """One row more among VOTES or TIES, on the disk when this returns, all of it or nothing.

        ValueError when what lies there is not a table of votes: it is left alone.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._alone():
            rows = [*self.rows(kind), row]
            path = self.folder / kind / PART
            path.parent.mkdir(exist_ok=True)
            _replace(path, pa.Table.from_pylist(rows, schema=SCHEMA))
            write_text(self.folder / "README.md", self._card())

    def rows(self, kind: str) -> list[dict]:
        """All of a kind, the oldest first."""
        path = self.folder / kind / PART
        if not path.exists():
            return []
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read, and is left alone ({error}): move it away") from None
        if table.schema.names != SCHEMA.names:
            raise ValueError(f"{path} is not a table of votes: move it away")
        return table.to_pylist()

    def _card(self) -> str:
        filled = [kind for kind in (VOTES, TIES) if (self.folder / kind / PART).exists()]
        return CARD.format(files="".join(f"  - split: {kind}\n    path: {kind}/part-*.parquet\n" for kind in filled))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One writer at a time, of all threads and processes; the kernel drops the lock when a process dies."""
        with open(self.folder / LOCK, "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def models_of(row: dict) -> tuple[tuple[str, str], tuple[str, str]]:
    """(policy, model's digest) of who wrote the better and the worse answer; ValueError when the row is not a vote."""
    try:
        told = json.loads(row["metadata"][3])
        return tuple((told[side]["policy"], told[side]["model"]) for side in "jk")
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError("among the votes is a row that is none: pairs of other sources belong elsewhere") from None


def _replace(path: Path, table: pa.Table) -> None:
    """The whole table under another name, on the disk, and then into place: readers see the old one or the new one."""
    with atomic_path(path, sync=True) as draft:
        pq.write_table(table, draft, compression="zstd")
