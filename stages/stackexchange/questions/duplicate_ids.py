"""Which question each post belongs to: no Id may stand for two posts, and up votes find their way to the question."""

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from stages.stackexchange.questions import hash_order
from stages.stackexchange.questions.sorted_runs import CLAIM_ORDER, in_order, part_of, write_run


@dataclass(frozen=True)
class Check:
    """One piece of work: the posts whose key lies in one part, of `parts`; `votes` is empty unless they are wanted."""

    part: int
    parts: int
    claims: list[Path]
    votes: list[Path]
    sites: list[str]  # by number of the source
    seed: int
    out: Path


@dataclass(frozen=True)
class Clash:
    """Two rows of one source that have one Id, and different questions."""

    source: int
    post: int
    offsets: tuple[int, int]


def check(work: Check) -> Clash | None:
    """The first clash of this part; without one, and with votes, `out` gets the up votes of each post by question."""
    if work.votes and work.out.exists():
        return None
    table = in_order(part_of(work.claims, work.part), CLAIM_ORDER)
    if clash := _clash(table):
        return clash
    if work.votes:
        write_run(work.out, _ups(table, part_of(work.votes, work.part), work), ["key", "source", "id"], work.parts)
    return None


def _clash(claims: pa.Table) -> Clash | None:
    sources, ids, homes, offsets = (claims[name].to_numpy() for name in ("source", "id", "home", "offset"))
    found = ((ids[1:] == ids[:-1]) & (sources[1:] == sources[:-1]) & (homes[1:] != homes[:-1])).nonzero()[0]
    if not len(found):
        return None
    at = found[0]
    return Clash(int(sources[at]), int(ids[at]), (int(offsets[at]), int(offsets[at + 1])))


def _ups(claims: pa.Table, votes: pa.Table, work: Check) -> pa.Table:
    """(key of the question, source, post, up votes); votes for posts that are not there are nobody's."""
    summed = votes.group_by(["source", "id"]).aggregate([("ups", "sum")])
    homes = claims.select(["source", "id", "home"]).group_by(["source", "id", "home"]).aggregate([])
    joined = summed.join(homes, ["source", "id"], join_type="inner")
    sites = [work.sites[source] for source in joined["source"].to_pylist()]
    keys = hash_order.question_keys_by_site(sites, work.seed, joined["home"].to_numpy())
    return pa.table({"key": keys, "source": joined["source"], "id": joined["id"], "ups": joined["ups_sum"]})
