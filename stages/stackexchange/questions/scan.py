"""Scan: read spans of the sources into sorted runs in scratch space; any process can run any task.

    posts-, sizes-, ids-NUMBER.arrow           a span of Posts.xml
    votes-NUMBER.arrow                         a span of Votes.xml
    records-, record_sizes-NUMBER-BATCH.arrow  row groups of a published table
"""

import json
from collections import Counter
from dataclasses import dataclass
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.files import write_json
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.dump.hub_tables import SPAN_BYTES, read_records
from stages.stackexchange.dump.scan_log import ROWS_BEFORE_EARLY_STOP, ScanLog, check_bad_rows
from stages.stackexchange.dump.xml_rows import read_rows
from stages.stackexchange.dump.xml_table import LineNumbers, XmlSpan
from stages.stackexchange.questions.post_columns import constant_column, post_columns, upvote_columns
from stages.stackexchange.questions.sorted_runs import (
    ID_ORDER,
    POST_ORDER,
    RECORD_ORDER,
    VOTE_ORDER,
    add_key_column,
    post_keys,
    question_keys,
    question_keys_by_site,
    write_run,
    write_run_with_sizes,
)
from stages.stackexchange.questions.table import SCHEMA, group_by_size, text_length

BATCH_ROWS = 2000


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A span of a source. Its runs are split into `parts` parts; `source` is an index into the run's sources."""

    number: int = 0
    source: int
    name: str  # of the dump, file or data set, for messages
    parts: int = 1
    folder: Path
    seed: int
    max_bad_rows_share: float
    max_row_bytes: int
    exclude: tuple[str, ...] = ()  # see post_columns.EXCLUSIONS

    @property
    def counts_path(self) -> Path:
        """Path of the task's counts, written last: the task is done if it exists."""
        return self.folder / f"done-{self.number:05d}.json"

    @property
    def quarantine_path(self) -> Path:
        """Path of the rows set aside."""
        return self.folder / f"quarantine-{self.number:05d}.jsonl"

    def run_path(self, kind: str, batch: int | None = None) -> Path:
        """Path of a sorted run."""
        return self.folder / f"{kind}-{self.number:05d}{'' if batch is None else f'-{batch:05d}'}.arrow"


@dataclass(frozen=True, kw_only=True)
class XmlScan(ScanTask):
    """A span of one table of one site's dump."""

    site: str
    table: str  # "posts" or "votes"
    path: Path
    span: XmlSpan

    @property
    def size_bytes(self) -> int:
        """Size of the span."""
        return self.span.bytes

    read_bytes = size_bytes


@dataclass(frozen=True, kw_only=True)
class RecordScan(ScanTask):
    """Row groups of one Parquet file of a published table, or all of a Hub data set (`row_groups` is None)."""

    row_groups: tuple[int, ...] | None
    size_bytes: int
    table = "records"
    path = None

    @property
    def read_bytes(self) -> int:
        """Size of the row groups; 0 for a Hub data set, whose `size_bytes` is a guess."""
        return self.size_bytes if self.row_groups else 0


def run_scans(tasks: list[ScanTask], source_names: list[str], workers: ProcessPool) -> tuple[Counter, Counter]:
    """Run all tasks and return the counts of posts (or records) and of votes.

    Raises ValueError for an empty table and for too many bad rows in one.
    """
    max_share = tasks[0].max_bad_rows_share
    progress = Progress("posts: read", sum(task.size_bytes for task in tasks), "bytes")
    counts: dict[tuple[str, int], Counter] = {(task.table, task.source): Counter() for task in tasks}
    for task, task_counts in zip(tasks, workers.imap(scan, tasks), strict=True):
        table_counts = counts[task.table, task.source]
        table_counts.update(task_counts)
        check_bad_rows(source_names[task.source], table_counts, max_share, ROWS_BEFORE_EARLY_STOP)
        progress.advance(task.size_bytes, f"{sum(table['rows_read'] for table in counts.values()):,} rows")
    progress.finish()
    posts, votes = Counter(), Counter()
    for (table, source), table_counts in counts.items():
        if not table_counts["rows_read"]:
            raise ValueError(f"{source_names[source]}: the {table} table has no rows")
        check_bad_rows(source_names[source], table_counts, max_share)
        (votes if table == "votes" else posts).update(table_counts)
    return posts, votes


def scan(task: ScanTask) -> dict[str, int]:
    """Read a task's span into sorted runs and return its counts; if that is done already, return the stored counts.

    Raises ValueError at anything but rows and at too many bad rows.
    """
    if task.counts_path.exists():
        return json.loads(task.counts_path.read_text())
    with open(task.quarantine_path, "w", encoding="utf-8") as quarantine:
        log = ScanLog(task.name, quarantine, task.max_row_bytes, task.max_bad_rows_share)
        SCANS[task.table](task, log)
    counts = dict(log.counts) | {"bytes_read": task.read_bytes}
    write_json(task.counts_path, counts)
    pa.default_memory_pool().release_unused()  # else memory grows from task to task
    return counts


def _scan_posts(task: XmlScan, log: ScanLog) -> None:
    rows = read_rows(task.path, task.span, log)
    tables = [post_columns([], [], log, task.exclude)]
    while batch := list(islice(rows, BATCH_ROWS)):  # a table is a fraction of the size of its rows
        tables.append(post_columns(*zip(*batch, strict=True), log, task.exclude))
    posts = pa.concat_tables(tables)
    posts = posts.append_column("source", constant_column(task.source, len(posts)))
    ids = posts.select(["source", "id", "question_id", "offset"])
    ids = add_key_column(ids, post_keys(task.site, task.seed, ids["id"].to_numpy()))
    write_run(task.run_path("ids"), ids, ID_ORDER, task.parts)
    posts = add_key_column(posts, question_keys(task.site, task.seed, posts["question_id"].to_numpy()))
    posts = posts.append_column("posts", constant_column(1, len(posts)))
    write_run_with_sizes(task.run_path("posts"), task.run_path("sizes"), posts, POST_ORDER, task.parts)


def _scan_votes(task: XmlScan, log: ScanLog) -> None:
    votes = upvote_columns(read_rows(task.path, task.span, log), log)
    votes = votes.append_column("source", constant_column(task.source, len(votes)))
    votes = add_key_column(votes, post_keys(task.site, task.seed, votes["id"].to_numpy()))
    write_run(task.run_path("votes"), votes, VOTE_ORDER, task.parts)


def _scan_records(task: RecordScan, log: ScanLog) -> None:
    for stale in task.folder.glob(f"record*-{task.number:05d}-*"):
        stale.unlink()
    records = ((number, record, text_length(record))
               for number, record in read_records(task.name, task.row_groups, log))
    for number, (batch, _) in enumerate(group_by_size(records, itemgetter(2), SPAN_BYTES)):
        runs = task.run_path("records", number), task.run_path("record_sizes", number)
        write_run_with_sizes(*runs, _record_table(batch, task), RECORD_ORDER, task.parts)


def _record_table(batch: list[tuple[int, dict, int]], task: RecordScan) -> pa.Table:
    """Build a table of records with their keys; each site's questions have their own order."""
    numbers, records, sizes = zip(*batch, strict=True)
    table = pa.Table.from_pylist(list(records), schema=SCHEMA)
    sites, ids = table["site"].to_pylist(), table["question_id"].to_numpy()
    columns = {"number": np.array(numbers, dtype=np.int64) + (task.number << 40),
               "size": np.array(sizes, dtype=np.int64),
               "source": constant_column(task.source, len(batch)),
               "posts": pc.add(pc.list_value_length(table["answers"]), 1)}
    table = add_key_column(table, question_keys_by_site(sites, task.seed, ids))
    return pa.table({name: table[name] for name in table.column_names} | columns)


SCANS = {"posts": _scan_posts, "votes": _scan_votes, "records": _scan_records}


def write_quarantine(tasks: list[ScanTask], path: Path) -> None:
    """Merge the tasks' quarantines, sorted by source and offset, and add the line number of each row of a dump."""
    with open(path, "w", encoding="utf-8") as stream:
        for xml_path, file_tasks in groupby(tasks, key=attrgetter("path")):
            line_numbers = LineNumbers(xml_path) if xml_path else None
            for task in (task for task in file_tasks if task.quarantine_path.exists()):
                with open(task.quarantine_path, encoding="utf-8") as lines:
                    for record in sorted(map(json.loads, lines), key=itemgetter("offset")):
                        line = {"line": line_numbers.at(record["offset"])} if line_numbers else {}
                        stream.write(json.dumps(record | line, ensure_ascii=False) + "\n")
