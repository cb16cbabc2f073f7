"""Read and write the posts artifact: question records with scored answers, in part-*.parquet.

votes: net (up minus down), or upvotes where the recipe says so; null where the source has none. score: see
`answer_score`. date: when the post was written, as the source writes it; of answers, empty
where the source does not say.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

# Live hosts of sites whose dumps have another name: links must lead to the live site, for attribution. Source:
# sedd/data/files_map.py of github.com/LunarWatcher/se-data-dump-transformer, read in 2026. Everywhere else a site keeps
# the name of its dump, so that the order of its questions does not change.
RENAMED = {"avp": "video", "beer": "alcohol", "cogsci": "psychology", "health": "medicalsciences",
           "materials": "mattermodeling", "moderators": "communitybuilding", "writers": "writing"}
SUFFIXES = (".stackexchange.com", ".meta.stackexchange.com")
LIVE_HOSTS = {old + suffix: new + suffix for old, new in RENAMED.items() for suffix in SUFFIXES}

GROUP_QUESTIONS = 500
BATCH_QUESTIONS = 200
GROUP_CHARACTERS = 16 << 20
ANSWER = pa.struct([("id", pa.int64()), ("text", pa.string()), ("author", pa.string()), ("author_url", pa.string()),
                    ("license", pa.string()), ("date", pa.string()), ("votes", pa.int64()), ("accepted", pa.bool_()),
                    ("score", pa.int64())])
SCHEMA = pa.schema([
    ("question_id", pa.int64()), ("site", pa.string()), ("title", pa.string()),
    ("question", pa.string()), ("markup", pa.string()),  # the raw body; "html" or "markdown"
    ("tags", pa.list_(pa.string())), ("date", pa.string()), ("url", pa.string()), ("author", pa.string()),
    ("author_url", pa.string()), ("license", pa.string()), ("answers", pa.list_(ANSWER)),
])


def list_parts(posts: Path) -> list[Path]:
    """List the files of a posts artifact, in order. Raises ValueError if there are none."""
    files = sorted(posts.glob("part-*.parquet"))
    if not files:
        raise ValueError(f"{posts}: no part-*.parquet here; give the folder that stages.posts made")
    return files


def read_questions(part: Path) -> Iterator[dict]:
    """Yield the records of one file, in constant memory."""
    for batch in pq.ParquetFile(part).iter_batches(BATCH_QUESTIONS):
        yield from batch.to_pylist()


def read_tags(posts: Path, questions: set[tuple]) -> dict[tuple, list[str]]:
    """Read the tags of these (site, question_id); questions that the artifact lacks are left out."""
    columns = ["site", "question_id", "tags"]
    rows = (row for part in list_parts(posts) for batch in pq.ParquetFile(part).iter_batches(columns=columns)
            for row in batch.to_pylist())
    return {key: row["tags"] for row in rows if (key := (row["site"], row["question_id"])) in questions}


def text_length(question: dict) -> int:
    """Count the characters of a record's texts."""
    return len(question["question"]) + sum(len(answer["text"]) for answer in question["answers"])


def group_by_size(items: Iterable[Any], size_of: Callable[[Any], int], least: int) -> Iterator[tuple[list, int]]:
    """Group neighbours until they have the size `least`, and yield each group with its size; the last may be smaller.
    """
    group, total = [], 0
    for item in items:
        group.append(item)
        total += size_of(item)
        if total >= least:
            yield group, total
            group, total = [], 0
    if group:
        yield group, total


def write_questions(path: Path, questions: Iterable[dict]) -> None:
    """Write records of SCHEMA to one file; memory holds one row group of GROUP_QUESTIONS or GROUP_CHARACTERS."""
    group, characters = [], 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for question in questions:
            group.append(question)
            characters += text_length(question)
            if len(group) == GROUP_QUESTIONS or characters >= GROUP_CHARACTERS:
                writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))
                group, characters = [], 0
        if group:
            writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))


def answer_score(votes: int, accepted: bool) -> int:
    """Compute round(log2(1 + votes)), plus 1 if the asker accepted the answer; -1 if votes are negative.

    Source: Askell et al. 2021, "A General Language Assistant"; StackLLaMA's card. Their wording leaves open what an
    accepted answer with negative votes gets; here it is -1, because more readers found it wrong than right.

    Computed in integers, so that every machine agrees: log2(1+v) rounds to k if (1+v)^2 is in [2^(2k-1), 2^(2k+1)),
    which holds if half the bit length of (1+v)^2, rounded down, is k. log2(1+v) is never exactly k + 1/2, so the
    rounding mode does not matter.

    Args:
        votes: net votes (the dump's `Score`: up minus down), or upvotes.
    """
    if votes < 0:
        return -1
    return ((1 + votes) ** 2).bit_length() // 2 + int(accepted)


def site_url(site: str) -> str:
    """Return the address of a site, given by the name of its dump."""
    return f"https://{LIVE_HOSTS.get(site, site)}"
