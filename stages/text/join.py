"""Posts to questions with scored answers, from slices of the runs that hold them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.text.head import lines_of
from stages.text.partition import QUESTION
from stages.text.runs import POST_ORDER, in_order, slices
from stages.text.scoring import answer_score
from stages.text.tally import Tally

SLICE_BYTES = 32 << 20
BATCH_ROWS = 1000


@dataclass(frozen=True)
class Origin:
    """A source of the run, for messages and links."""

    name: str
    site: str
    path: Path


def cuts(runs: list[Path], bounds: tuple[int, int], max_question_bytes: int, tally: Tally) -> list[tuple[int, int]]:
    """Ranges of keys that hold SLICE_BYTES at most, or one question; questions over the limit are in none of them."""
    if not runs:
        return []
    index = slices(runs, *bounds, ["key", "size"])
    keys, which, posts = np.unique(index["key"].to_numpy(), return_inverse=True, return_counts=True)
    sizes = np.bincount(which, weights=index["size"].to_numpy(), minlength=len(keys))
    over = sizes > max_question_bytes
    for number in posts[over]:
        tally.drop("over max_question_bytes", int(number))
    run_of = np.cumsum(over)[~over]  # of keys without one between them that is left out
    keys, through = keys[~over], np.cumsum(sizes[~over])
    found, first = [], 0
    while first < len(keys):
        before = through[first - 1] if first else 0
        full = int(np.searchsorted(through, before + SLICE_BYTES, "right"))
        last = min(max(first + 1, full), int(np.searchsorted(run_of, run_of[first], "right")))
        found.append((int(keys[first]), int(keys[last - 1]) + 1))
        first = last
    return found


def joined(posts: list[Path], ups: list[Path], low: int, high: int, origins: list[Origin], tally: Tally
           ) -> Iterator[tuple[int, dict]]:
    """(key, question record) of the keys from `low` up to `high`; without `ups`, votes are the posts' own."""
    votes = _ups(ups, low, high) if ups else None
    rows = as_dicts(slices(posts, low, high), POST_ORDER)
    for (key, source, _), group in groupby(rows, key=itemgetter("key", "source", "home")):
        origin = origins[source]
        question, *answers = _without_copies(group, origin, tally)
        if question["kind"] != QUESTION:
            tally.drop("answers without their question", 1 + len(answers), questions=0)
            continue
        if votes is not None:
            answers = [answer | {"ups": votes.get((source, answer["id"]), 0)} for answer in answers]
        yield key, _question(question, answers, origin, tally)


def _ups(runs: list[Path], low: int, high: int) -> dict[tuple[int, int], int]:
    """Up votes by (source, post)."""
    table = slices(runs, low, high)
    return dict(zip(zip(table["source"].to_pylist(), table["id"].to_pylist(), strict=True),
                    table["ups"].to_pylist(), strict=True))


def as_dicts(table: pa.Table, columns: list[str]) -> Iterator[dict]:
    """Rows in the order of the columns."""
    for batch in in_order(table, columns).to_batches(max_chunksize=BATCH_ROWS):
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
    first, second = lines_of(origin.path, sorted(offsets))
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
