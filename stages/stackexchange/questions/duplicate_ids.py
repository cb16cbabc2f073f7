"""Check that no id is used by two posts, and assign each post's upvotes to its question."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stages.runtime.process_pool import ProcessPool
from stages.stackexchange.dump.xml_table import LineNumbers
from stages.stackexchange.questions import hash_order
from stages.stackexchange.questions.sorted_runs import ID_ORDER, VOTE_ORDER, read_part, sort_table, write_run


@dataclass(frozen=True)
class SourceInfo:
    """Name (for messages), site and Posts.xml of a source."""

    name: str
    site: str
    path: Path


@dataclass(frozen=True)
class IdCheck:
    """The posts whose key is in one of `parts` parts; `votes` is empty unless upvotes are needed."""

    part: int
    parts: int
    ids: list[Path]
    votes: list[Path]
    sites: list[str]  # by source
    seed: int
    out: Path


@dataclass(frozen=True)
class DuplicateId:
    """Two rows of one source that have the same id and different questions."""

    source: int
    post_id: int
    offsets: tuple[int, int]


def check_ids(runs: dict[str, list[Path]], sources: list[SourceInfo], parts: int, seed: int, folder: Path,
              workers: ProcessPool) -> list[Path]:
    """Check all posts of dumps, and return the runs of upvotes by question (none without runs of votes).

    Raises ValueError if an id is used twice.
    """
    sites = [source.site for source in sources]
    checks = [IdCheck(part, parts, runs["ids"], runs["votes"], sites, seed, folder / f"upvotes-{part:05d}.arrow")
              for part in range(parts if runs["ids"] else 0)]
    for duplicate in workers.imap(check_part, checks):
        if duplicate:
            raise duplicate_id_error(sources[duplicate.source], duplicate.post_id, duplicate.offsets)
    return [check.out for check in checks if runs["votes"]]


def check_part(check: IdCheck) -> DuplicateId | None:
    """Return the part's first duplicate id; if there is none, write the upvotes by question (if there are votes)."""
    if check.votes and check.out.exists():
        return None
    ids = sort_table(read_part(check.ids, check.part), ID_ORDER)
    if duplicate := _find_duplicate(ids):
        return duplicate
    if check.votes:
        write_run(check.out, _join_votes(ids, read_part(check.votes, check.part), check), VOTE_ORDER, check.parts)
    return None


def duplicate_id_error(source: SourceInfo, post_id: int, offsets: tuple[int, int]) -> ValueError:
    """Build the error for two different rows with the same id."""
    line_numbers = LineNumbers(source.path)
    first, second = (line_numbers.at(offset) for offset in sorted(offsets))
    return ValueError(f"{source.name}: two different rows have Id {post_id}: lines {first} and {second}; remove one")


def _find_duplicate(ids: pa.Table) -> DuplicateId | None:
    sources, post_ids, question_ids, offsets = (ids[name].to_numpy() for name in
                                                ("source", "id", "question_id", "offset"))
    rows = ((post_ids[1:] == post_ids[:-1]) & (sources[1:] == sources[:-1])
            & (question_ids[1:] != question_ids[:-1])).nonzero()[0]
    if not len(rows):
        return None
    row = rows[0]
    return DuplicateId(int(sources[row]), int(post_ids[row]), (int(offsets[row]), int(offsets[row + 1])))


def _join_votes(ids: pa.Table, votes: pa.Table, check: IdCheck) -> pa.Table:
    """Return (key of the question, source, post id, upvotes); votes for posts that do not exist are dropped."""
    totals = votes.group_by(["source", "id"]).aggregate([("upvotes", "sum")])
    columns = ["source", "id", "question_id"]
    joined = totals.join(ids.select(columns).group_by(columns).aggregate([]), ["source", "id"], join_type="inner")
    sites = [check.sites[source] for source in joined["source"].to_pylist()]
    keys = hash_order.question_keys_by_site(sites, check.seed, joined["question_id"].to_numpy())
    return pa.table({"key": keys, "source": joined["source"], "id": joined["id"], "upvotes": joined["upvotes_sum"]})
