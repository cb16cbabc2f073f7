"""Check that no id is used by two posts, assign each post's upvotes to its question, and join one part's posts to
questions with scored answers.
"""

import re
from collections.abc import Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.runtime.process_pool import ProcessPool
from stages.stackexchange.dump.sources import Source
from stages.stackexchange.dump.xml_table import LineNumbers
from stages.stackexchange.questions.counts import Counts
from stages.stackexchange.questions.post_columns import QUESTION
from stages.stackexchange.questions.sorted_runs import (
    ID_ORDER,
    POST_ORDER,
    VOTE_ORDER,
    question_keys_by_site,
    read_part,
    sort_table,
    write_run,
)
from stages.stackexchange.questions.table import answer_score, site_url

RANGE_BYTES = 96 << 20  # of text; sorting holds it twice, and a part is rarely larger
BATCH_ROWS = 1000


def check_ids(runs: dict[str, list[Path]], sources: list[Source], parts: int, seed: int, folder: Path,
              workers: ProcessPool) -> list[Path]:
    """Check all posts of dumps, and return the runs of upvotes by question (none without runs of votes).

    Raises ValueError if an id is used twice.
    """
    check = partial(check_part, parts=parts, runs=runs, sources=sources, seed=seed, folder=folder)
    return [path for path in workers.imap(check, range(parts if runs["ids"] else 0)) if path]


def check_part(part: int, *, parts: int, runs: dict[str, list[Path]], sources: list[Source], seed: int, folder: Path
               ) -> Path | None:
    """Check the posts whose key is in one part; then, if there are votes, write the upvotes by question."""
    out = folder / f"upvotes-{part:05d}.arrow"
    if not out.exists():
        ids = sort_table(read_part(runs["ids"], part), ID_ORDER)
        _check_unique(ids, sources)
        if not runs["votes"]:
            return None
        votes = _join_votes(ids, read_part(runs["votes"], part), sources, seed)
        write_run(out, votes, VOTE_ORDER, parts)
    return out


def _duplicate_id_error(source: Source, post_id: int, offsets: tuple[int, int]) -> ValueError:
    """Build the error for two different rows with the same id."""
    line_numbers = LineNumbers(Path(source.posts.path))
    first, second = (line_numbers.at(offset) for offset in sorted(offsets))
    return ValueError(f"{source.name}: two different rows have Id {post_id}: lines {first} and {second}; remove one")


def _check_unique(ids: pa.Table, sources: list[Source]) -> None:
    """Raise ValueError for the first id that is used for two questions."""
    source, post_id, question_id, offset = (ids[name].to_numpy() for name in ("source", "id", "question_id", "offset"))
    rows = ((post_id[1:] == post_id[:-1]) & (source[1:] == source[:-1])
            & (question_id[1:] != question_id[:-1])).nonzero()[0]
    if len(rows):
        row = rows[0]
        raise _duplicate_id_error(sources[source[row]], post_id[row], (offset[row], offset[row + 1]))


def _join_votes(ids: pa.Table, votes: pa.Table, sources: list[Source], seed: int) -> pa.Table:
    """Return (key of the question, source, post id, upvotes); votes for posts that do not exist are dropped."""
    totals = votes.group_by(["source", "id"]).aggregate([("upvotes", "sum")])
    columns = ["source", "id", "question_id"]
    joined = totals.join(ids.select(columns).group_by(columns).aggregate([]), ["source", "id"], join_type="inner")
    row_sites = [sources[source].site for source in joined["source"].to_pylist()]
    keys = question_keys_by_site(row_sites, seed, joined["question_id"].to_numpy())
    return pa.table({"key": keys, "source": joined["source"], "id": joined["id"], "upvotes": joined["upvotes_sum"]})


def key_ranges(sizes: list[Path], part: int, max_question_bytes: int, counts: Counts) -> list[np.ndarray]:
    """Split the sorted keys of a part into ranges of about RANGE_BYTES, which are joined at once.

    Questions over their limit are left out and counted as dropped.
    """
    if not sizes:
        return []
    table = read_part(sizes, part)
    keys, key_index = np.unique(table["key"].to_numpy(), return_inverse=True)
    size, posts = (np.bincount(key_index, weights=table[name].to_numpy(), minlength=len(keys))
                   for name in ("size", "posts"))
    too_big = size > max_question_bytes
    for number in posts[too_big]:
        counts.drop("over max_question_bytes", int(number))
    keys, range_number = keys[~too_big], np.cumsum(size[~too_big]) // RANGE_BYTES
    return np.split(keys, np.flatnonzero(np.diff(range_number)) + 1) if len(keys) else []


def join_posts(runs: dict[str, list[Path]], part: int, keys: np.ndarray, sources: list[Source],
               counts: Counts) -> Iterator[tuple[int, dict]]:
    """Yield (key, question record) in the order of the keys; without runs of upvotes, votes are the posts' own."""
    upvotes = _read_upvotes(runs["upvotes"], part, keys) if runs["upvotes"] else None
    posts = sorted_rows(read_part(runs["posts"], part, keys), POST_ORDER)
    for (key, source_number, _), group in groupby(posts, key=itemgetter("key", "source", "question_id")):
        source = sources[source_number]
        question, *answers = _drop_copies(group, source, counts)
        if question["kind"] != QUESTION:
            counts.drop("answers without their question", 1 + len(answers), questions=0)
            continue
        if upvotes is not None:
            answers = [answer | {"upvotes": upvotes.get((source_number, answer["id"]), 0)} for answer in answers]
        yield key, question_record(question, answers, source.site, counts)


def sorted_rows(table: pa.Table, order: list[str]) -> Iterator[dict]:
    """Yield the rows, sorted by these columns."""
    table = sort_table(table, order)  # rebinds the name: the unsorted table is freed
    for batch in table.to_batches(max_chunksize=BATCH_ROWS):
        yield from batch.to_pylist()


def _read_upvotes(runs: list[Path], part: int, keys: np.ndarray) -> dict[tuple[int, int], int]:
    """Return upvotes by (source, post id)."""
    table = read_part(runs, part, keys)
    columns = (table[name].to_pylist() for name in ("source", "id", "upvotes"))
    return {(source, post_id): upvotes for source, post_id, upvotes in zip(*columns, strict=True)}


def _drop_copies(posts: Iterator[dict], source: Source, counts: Counts) -> list[dict]:
    """Return a question's posts, the question first; identical copies of a row are counted as dropped."""
    by_id: dict[int, dict] = {}
    for post in posts:
        first = by_id.setdefault(post["id"], post)
        if first is not post:
            if first | {"offset": 0} != post | {"offset": 0}:
                raise _duplicate_id_error(source, post["id"], (first["offset"], post["offset"]))
            counts.drop("identical copies of a row", 1, questions=0)
    return list(by_id.values())


def question_record(question: dict, answers: list[dict], site: str, counts: Counts) -> dict:
    """Build a question record with scored answers from its posts."""
    accepted_id = question["accepted"]
    if accepted_id is not None and all(accepted_id != answer["id"] for answer in answers):
        counts["accepted_not_in_the_file"][site] += 1
    return {
        "question_id": question["id"], "site": site, "title": question["title"], "question": question["body"],
        "markup": "html", "tags": re.findall(r"[^<>|]+", question["tags"]), "date": question["date"],
        "url": f"{site_url(site)}/questions/{question['id']}", **_attribution(question, site),
        "license": question["license"],
        "answers": [_answer_record(answer, answer["id"] == accepted_id, site) for answer in answers],
    }


def _answer_record(answer: dict, accepted: bool, site: str) -> dict:
    """Build an answer. Upvotes, if used, give the score, except for a post whose net votes are negative."""
    votes = answer.get("upvotes", answer["votes"])
    score = answer_score(votes if answer["votes"] >= 0 else answer["votes"], accepted)
    return {"id": answer["id"], "text": answer["body"], **_attribution(answer, site), "license": answer["license"],
            "date": answer["date"], "votes": votes, "accepted": accepted, "score": score}


def _attribution(post: dict, site: str) -> dict:
    """Return the author's name and profile, which CC BY-SA requires to be shown."""
    user = post["user"]
    return {"author": post["author"] or ("unknown" if user is None else f"user {user}"),
            "author_url": "" if user is None else f"{site_url(site)}/users/{user}"}
