"""Save a person's votes as preference pairs, in a folder like a pairs artifact that grows by one row per vote.

`reward/part-00000.parquet` has the votes, better answer first, with the columns and types of the pairs artifact;
`ties/part-00000.parquet` has the ties (both scores 0). It is not an artifact: it has no manifest, which the next
vote would make wrong. A stage that reads it records the digest of its files.
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
from huggingface_hub import DatasetCardData

from stages.runtime.files import atomic_path, write_text
from stages.stackexchange.pairs.table import DATES, SCHEMA

VOTES, TIES = "reward", "ties"  # folders; the reward stage reads the split `reward`
PART, LOCK = "part-00000.parquet", ".lock"
TYPED = "typed"  # site of a question that is not from the pairs
TITLE = "Votes on answers of language models"
CARD = f"""
# {TITLE}

A person compared two answers to a question without knowing which model wrote them, and chose the better one,
`response_j`. `authors` names the author of the question, then the two models. The fourth entry of `metadata` is JSON:
the time, the temperature and the length limit, and for each answer the model's digest, its reward and whether it ended
by itself.

`ties` has the answers that were called equally good, or both bad; a reward model cannot learn from them.

Many of the questions are from the evaluation split: a model trained on these votes must be evaluated on others.
"""


@dataclass(frozen=True)
class VotedAnswer:
    """An answer to vote on. model: digest of the model, or ''; ended: by EOS, not cut off."""

    policy: str
    model: str
    text: str
    reward: float | None
    ended: bool

    def metadata(self) -> dict:
        return {name: value for name, value in asdict(self).items() if name != "text"}


@dataclass(frozen=True)
class Question:
    """The question of a vote; row: its row in the pairs table, or None if it was typed."""

    text: str
    row: dict | None = None

    def columns(self) -> dict:
        """Return the question's columns of SCHEMA; the id of a typed question is a hash of its text."""
        row = self.row
        if row is None:
            qid = int.from_bytes(hashlib.sha256(self.text.encode()).digest()[:7])
            return {"qid": qid, "site": TYPED, "question": self.text, "metadata": ["", "", ""],
                    "authors": [""], "author_urls": [""], "licenses": [""]}
        return {"qid": row["qid"], "site": row["site"], "question": self.text, "metadata": list(row["metadata"] or []),
                **{name: list(row.get(name) or [""])[:1] for name in ("authors", "author_urls", "licenses")}}


def vote_row(question: Question, better: VotedAnswer, worse: VotedAnswer, sampling: dict, tie: bool = False) -> dict:
    """Build a row of SCHEMA; sampling: settings of both answers."""
    columns, now = question.columns(), datetime.now(UTC).isoformat(timespec="milliseconds")
    vote = json.dumps({"voted": now, **sampling, "j": better.metadata(), "k": worse.metadata()}, ensure_ascii=False)
    return {**columns, "response_j": better.text, "response_k": worse.text, "score_j": 0 if tie else 1, "score_k": 0,
            "date": now, "metadata": [*columns["metadata"][:3], *[""] * (3 - len(columns["metadata"])), vote],
            "answer_j": None, "answer_k": None,  # not posts: they have no ids
            "date_j": None, "date_k": None,
            "authors": [*columns["authors"], better.policy, worse.policy],
            "author_urls": [*columns["author_urls"], "", ""], "licenses": [*columns["licenses"], "", ""]}


class Votes:
    """The folder of votes, created by the first one; several pages and processes may add votes at once."""

    def __init__(self, folder: Path):
        self.folder = Path(folder)

    def add(self, kind: str, row: dict) -> None:
        """Append a row to VOTES or TIES, atomically and flushed to disk.

        Raises ValueError, and changes nothing, if the existing file is not a table of votes.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with self._hold_lock():
            rows = [*self.rows(kind), row]
            path = self.folder / kind / PART
            path.parent.mkdir(exist_ok=True)
            with atomic_path(path, sync=True) as draft:
                pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), draft, compression="zstd")
            write_text(self.folder / "README.md", self._card())

    def rows(self, kind: str) -> list[dict]:
        """Read all rows of VOTES or TIES, oldest first."""
        path = self.folder / kind / PART
        if not path.exists():
            return []
        try:
            table = pq.ParquetFile(path).read()
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"{path} cannot be read, and is left alone ({error}): move it away") from None
        older = [name for name in SCHEMA.names if name not in DATES]  # votes of versions before these columns
        if table.schema.names not in (SCHEMA.names, older):
            raise ValueError(f"{path} is not a table of votes: move it away")
        return table.to_pylist()

    def _card(self) -> str:
        filled = [kind for kind in (VOTES, TIES) if (self.folder / kind / PART).exists()]
        files = [{"split": kind, "path": f"{kind}/part-*.parquet"} for kind in filled]
        data = DatasetCardData(pretty_name=TITLE, configs=[{"config_name": "default", "data_files": files}])
        return f"---\n{data.to_yaml()}\n---\n{CARD}"

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        """Allow one writer at a time over all threads and processes; the kernel releases a dead process's lock."""
        with open(self.folder / LOCK, "w") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            yield


def parse_vote_models(row: dict) -> tuple[tuple[str, str], tuple[str, str]]:
    """Return (policy, digest of the model) of the better and the worse answer; ValueError if the row is not a vote."""
    try:
        vote = json.loads(row["metadata"][3])
        return tuple((vote[side]["policy"], vote[side]["model"]) for side in "jk")
    except (IndexError, KeyError, TypeError, ValueError):
        raise ValueError("a row among the votes is not a vote: keep pairs of other sources in another folder") from None
