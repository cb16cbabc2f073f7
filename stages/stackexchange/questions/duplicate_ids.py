"""Check that no id is used by two posts, and assign each post's upvotes to its question."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa

from stages.runtime.process_pool import ProcessPool
from stages.stackexchange.dump.xml_table import LineNumbers
from stages.stackexchange.questions.sorted_runs import (
    ID_ORDER,
    VOTE_ORDER,
    question_keys_by_site,
    read_part,
    sort_table,
    write_run,
)


@dataclass(frozen=True)
class SourceInfo:
    """Name (for messages), site and Posts.xml of a source."""

    name: str
    site: str
    path: Path


def check_ids(runs: dict[str, list[Path]], sources: list[SourceInfo], parts: int, seed: int, folder: Path,
              workers: ProcessPool) -> list[Path]:
    """Check all posts of dumps, and return the runs of upvotes by question (none without runs of votes).

    Raises ValueError if an id is used twice.
    """
    check = partial(check_part, parts=parts, runs=runs, sites=[source.site for source in sources], seed=seed,
                    folder=folder)
    for duplicate in workers.imap(check, range(parts if runs["ids"] else 0)):
        if duplicate:
            source, post_id, offsets = duplicate
            raise duplicate_id_error(sources[source], post_id, offsets)
    return [_upvotes_path(folder, part) for part in range(parts)] if runs["ids"] and runs["votes"] else []


def check_part(part: int, *, parts: int, runs: dict[str, list[Path]], sites: list[str], seed: int, folder: Path
               ) -> tuple[int, int, tuple[int, int]] | None:
    """Check the posts whose key is in one part; then, if there are votes, write the upvotes by question.

    Returns (source, post id, offsets of two rows) of the first id that is used for two questions, or None.
    """
    out = _upvotes_path(folder, part)
    if runs["votes"] and out.exists():
        return None
    ids = sort_table(read_part(runs["ids"], part), ID_ORDER)
    if duplicate := _find_duplicate(ids):
        return duplicate
    if runs["votes"]:
        write_run(out, _join_votes(ids, read_part(runs["votes"], part), sites, seed), VOTE_ORDER, parts)
    return None


def _upvotes_path(folder: Path, part: int) -> Path:
    return folder / f"upvotes-{part:05d}.arrow"


def duplicate_id_error(source: SourceInfo, post_id: int, offsets: tuple[int, int]) -> ValueError:
    """Build the error for two different rows with the same id."""
    line_numbers = LineNumbers(source.path)
    first, second = (line_numbers.at(offset) for offset in sorted(offsets))
    return ValueError(f"{source.name}: two different rows have Id {post_id}: lines {first} and {second}; remove one")


def _find_duplicate(ids: pa.Table) -> tuple[int, int, tuple[int, int]] | None:
    sources, post_ids, question_ids, offsets = (ids[name].to_numpy() for name in
                                                ("source", "id", "question_id", "offset"))
    rows = ((post_ids[1:] == post_ids[:-1]) & (sources[1:] == sources[:-1])
            & (question_ids[1:] != question_ids[:-1])).nonzero()[0]
    if not len(rows):
        return None
    row = rows[0]
    return int(sources[row]), int(post_ids[row]), (int(offsets[row]), int(offsets[row + 1]))


def _join_votes(ids: pa.Table, votes: pa.Table, sites: list[str], seed: int) -> pa.Table:
    """Return (key of the question, source, post id, upvotes); votes for posts that do not exist are dropped."""
    totals = votes.group_by(["source", "id"]).aggregate([("upvotes", "sum")])
    columns = ["source", "id", "question_id"]
    joined = totals.join(ids.select(columns).group_by(columns).aggregate([]), ["source", "id"], join_type="inner")
    row_sites = [sites[source] for source in joined["source"].to_pylist()]
    keys = question_keys_by_site(row_sites, seed, joined["question_id"].to_numpy())
    return pa.table({"key": keys, "source": joined["source"], "id": joined["id"], "upvotes": joined["upvotes_sum"]})
