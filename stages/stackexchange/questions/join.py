"""Posts to questions with scored answers, from the parts of the runs that hold them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.stackexchange.dump.xml_table import Lines
from stages.stackexchange.questions.counts import Tally
from stages.stackexchange.questions.scoring import answer_score
from stages.stackexchange.questions.sorted_runs import POST_ORDER, in_order, part_of
from stages.stackexchange.questions.spans import QUESTION

CUT_BYTES = 96 << 20  # of text, which sorting holds twice; a part is rarely larger
BATCH_ROWS = 1000


@dataclass(frozen=True)
class Origin:
    """A source of the run, for messages and links."""

    name: str
    site: str
    path: Path


@dataclass(frozen=True)
class Cut:
    """Keys that are joined at once: from `low` to `high`, both included, without those in `over`."""

    low: int
    high: int
    over: tuple[int, ...]

    def __call__(self, keys: np.ndarray) -> np.ndarray:
        wanted = (keys >= np.uint64(self.low)) & (keys <= np.uint64(self.high))
        return wanted & ~np.isin(keys, np.array(self.over, dtype=np.uint64)) if self.over else wanted


def cuts(sizes: list[Path], part: int, max_question_bytes: int, tally: Tally) -> list[Cut]:
    """A part in one, unless it holds more than CUT_BYTES; questions over their limit are in no cut, but counted."""
    if not sizes:
        return []
    index = part_of(sizes, part)
    keys, which = np.unique(index["key"].to_numpy(), return_inverse=True)
    size_of, posts = (np.bincount(which, weights=index[name].to_numpy(), minlength=len(keys))
                      for name in ("size", "posts"))
    big = size_of > max_question_bytes
    for number in posts[big]:
        tally.drop("over max_question_bytes", int(number))
    over, keys = tuple(keys[big].tolist()), keys[~big]
    if not len(keys):
        return []
    group = (np.cumsum(size_of[~big]) // CUT_BYTES).astype(int)
    firsts = np.flatnonzero(np.diff(group, prepend=-1))
    lasts = [*(firsts[1:] - 1), len(keys) - 1]
    return [Cut(int(keys[first]), int(keys[last]), over) for first, last in zip(firsts, lasts, strict=True)]


def joined(posts: list[Path], ups: list[Path], part: int, cut: Cut, origins: list[Origin], tally: Tally
           ) -> Iterator[tuple[int, dict]]:
    """(key, question record) of the keys in `cut`; without `ups`, votes are the posts' own."""
    votes = _ups(ups, part, cut) if ups else None
    rows = as_dicts(part_of(posts, part, cut), POST_ORDER)
    for (key, source, _), group in groupby(rows, key=itemgetter("key", "source", "home")):
        origin = origins[source]
        question, *answers = _without_copies(group, origin, tally)
        if question["kind"] != QUESTION:
            tally.drop("answers without their question", 1 + len(answers), questions=0)
            continue
        if votes is not None:
            answers = [answer | {"ups": votes.get((source, answer["id"]), 0)} for answer in answers]
        yield key, _question(question, answers, origin, tally)


def _ups(runs: list[Path], part: int, cut: Cut) -> dict[tuple[int, int], int]:
    """Up votes by (source, post)."""
    table = part_of(runs, part, cut)
    return dict(zip(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True),
                    table["ups"].to_pylist(), strict=True))


def as_dicts(table: pa.Table, columns: list[str]) -> Iterator[dict]:
    """Rows in the order of the columns."""
    table = in_order(table, columns)  # and the other order goes
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield from batch.to_pylist()


def _without_copies(group: Iterator[dict], origin: Origin, tally: Tally) -> list[dict]:
    """Rows of one question, the question first; an identical row counts once."""
    kept: dict[int, dict] = {}
    for row in group:
        first = kept.setdefault(row["id"], row)
        if first is not row:
            if first | {"offset": 0} != row | {"offset": 0}:
                raise double_id(origin, row["id"], (first["offset"], row["offset"]))
            tally.drop("identical copies of a row", 1, questions=0)
    return list(kept.values())


def double_id(origin: Origin, post: int, offsets: tuple[int, int]) -> ValueError:
    lines = Lines(origin.path)
    first, second = (lines.at(offset) for offset in sorted(offsets))
    return ValueError(f"{origin.name}: two different rows have Id {post}: lines {first} and {second}; remove one")


def _question(question: dict, answers: list[dict], origin: Origin, tally: Tally) -> dict:
    accepted = question["accepted"]
    if accepted is not None and all(accepted != answer["id"] for answer in answers):
        tally.counts["accepted_not_in_the_file"][origin.site] += 1
    return {
        "question_id": question["id"], "site": origin.site, "title": question["title"], "question": question["body"],
        "markup": "html", "tags": re.findall(r"[^<>|]+", question["tags"]), "date": question["date"],
        "url": f"https://{origin.site}/questions/{question['id']}", **_by(question, origin.site),
        "license": question["license"],
        "answers": [_answer(answer, answer["id"] == accepted, origin.site) for answer in answers],
    }


def _answer(answer: dict, accepted: bool, site: str) -> dict:
    """Up votes give the score where they are asked for, but for a post that was voted below zero."""
    votes = answer.get("ups", answer["votes"])
    score = answer_score(votes if answer["votes"] >= 0 else answer["votes"], accepted)
    return {"id": answer["id"], "text": answer["body"], **_by(answer, site), "license": answer["license"],
            "votes": votes, "accepted": accepted, "score": score}


def _by(post: dict, site: str) -> dict:
    """Author's name and page, as CC BY-SA asks to show them."""
    user = post["user"]
    return {"author": post["author"] or ("unknown" if user is None else f"user {user}"),
            "author_url": "" if user is None else f"https://{site}/users/{user}"}
