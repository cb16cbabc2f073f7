"""Scan: plan tasks, each a span of a source, and read them into sorted runs in scratch space, in any process.

    posts-, sizes-, ids-NUMBER.arrow           a span of Posts.xml
    votes-NUMBER.arrow                         a span of Votes.xml
    records-, record_sizes-NUMBER-BATCH.arrow  row groups of a published table
"""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import attrgetter, itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.files import check_free_space, used_bytes, write_json
from stages.runtime.process_pool import ProcessPool
from stages.runtime.progress import Progress
from stages.stackexchange.dump.archives import SCRATCH, Table, required_bytes, unpack_table
from stages.stackexchange.dump.hub_tables import list_parquet_files, read_records, split_row_groups
from stages.stackexchange.dump.scan_log import ScanLog
from stages.stackexchange.dump.sources import Source
from stages.stackexchange.dump.xml_table import LineNumbers, XmlSpan, read_rows, split_spans
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

SPAN_BYTES = 32 << 20
BATCH_ROWS = 2000
ROWS_BEFORE_EARLY_STOP = 100_000
MAX_NAMES = 4  # of dumps, in a message
HUB_BYTES = 8 << 30  # assumed for a Hub data set, whose size is not known in advance


@dataclass(frozen=True, kw_only=True)
class ScanTask:
    """A span of a dump's table, row groups of a published Parquet file, or all of a Hub data set.

    Its runs are split into `parts` parts; `source` is an index into the run's sources.
    """

    number: int = 0
    source: int
    name: str  # of the dump, file or data set, for messages
    site: str | None  # of a dump
    table: str  # "posts", "votes" or, of a published table, "records"
    path: Path | None = None  # of a dump's table
    span: XmlSpan | None = None  # of a dump's table
    row_groups: tuple[int, ...] | None = None  # of a Parquet file
    size_bytes: int  # a guess for a Hub data set
    parts: int = 1
    folder: Path
    seed: int
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


def plan_scans(sources: list[Source], scratch: Path, part_bytes: int, **options) -> tuple[list[Source], list[ScanTask]]:
    """Unpack what is packed into `scratch`, and split all tables into tasks; return the sources with plain tables, too.

    Results in `scratch` of a run with another plan are deleted.

    Args:
        options: seed, max_row_bytes and exclude of `ScanTask`.
    """
    _check_scratch_space([table for source in sources for table in source.tables], scratch)
    unpacked = [_unpack(source, scratch) for source in sources]
    tasks = [task for number, source in enumerate(unpacked)
             for task in _split(source, {"source": number, "site": source.site, "folder": scratch, **options})]
    text_bytes = sum(task.size_bytes for task in tasks if task.table != "votes")
    parts = max(1, -(-text_bytes // part_bytes))
    tasks = [replace(task, number=number, parts=parts) for number, task in enumerate(tasks)]
    _delete_other_plan(tasks, scratch)
    return unpacked, tasks


def _check_scratch_space(tables: list[Table], scratch: Path) -> None:
    """Raise ValueError if there is too little room for all tables; what an earlier run left counts as theirs."""
    names = ", ".join(dict.fromkeys(table.path for table in tables[:MAX_NAMES])) + ", ..." * (len(tables) > MAX_NAMES)
    check_free_space(names, scratch, sum(map(required_bytes, tables)) - used_bytes(scratch), SCRATCH)


def _unpack(source: Source, scratch: Path) -> Source:
    tables = {table.name.lower(): replace(table, path=str(unpack_table(table, scratch))) for table in source.tables}
    return replace(source, **tables)


def _split(source: Source, common: dict) -> Iterator[ScanTask]:
    if source.kind == "hub":
        yield ScanTask(name=source.name, table="records", size_bytes=HUB_BYTES, **common)
    if source.kind == "parquet":
        for file in list_parquet_files(Path(source.name)):
            for groups, size_bytes in split_row_groups(file, SPAN_BYTES):
                yield ScanTask(name=str(file), table="records", row_groups=groups, size_bytes=size_bytes, **common)
    for table in source.tables:
        path, name = Path(table.path), table.name.lower()
        for span in split_spans(path, name, source.name, SPAN_BYTES):
            yield ScanTask(name=source.name, table=name, path=path, span=span, size_bytes=span.stop - span.start,
                           **common)


def _delete_other_plan(tasks: list[ScanTask], scratch: Path) -> None:
    plan, path = [str(task) for task in tasks], scratch / "plan.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != plan:
        for stale in scratch.iterdir():
            if stale.suffix != ".xml":  # unpacked tables stay valid
                stale.unlink()
        write_json(path, plan)


def run_scans(tasks: list[ScanTask], sources: list[Source], max_bad_rows_share: float, workers: ProcessPool
              ) -> tuple[Counter, Counter]:
    """Run all tasks and return the counts of posts (or records) and of votes.

    Raises ValueError for an empty table and for too many bad rows in one.
    """
    progress = Progress("posts: read", sum(task.size_bytes for task in tasks), "bytes")
    counts: dict[tuple[str, int], Counter] = {(task.table, task.source): Counter() for task in tasks}
    for task, task_counts in zip(tasks, workers.imap(scan, tasks), strict=True):
        table_counts = counts[task.table, task.source]
        table_counts.update(task_counts)
        if table_counts["rows_read"] >= ROWS_BEFORE_EARLY_STOP:
            _check_bad_rows(sources[task.source].name, table_counts, max_bad_rows_share)
        progress.advance(task.size_bytes, f"{sum(table['rows_read'] for table in counts.values()):,} rows")
    progress.finish()
    posts, votes = Counter(), Counter()
    for (table, source), table_counts in counts.items():
        if not table_counts["rows_read"]:
            raise ValueError(f"{sources[source].name}: the {table} table has no rows")
        _check_bad_rows(sources[source].name, table_counts, max_bad_rows_share)
        (votes if table == "votes" else posts).update(table_counts)
    return posts, votes


def _check_bad_rows(name: str, counts: Counter, max_share: float) -> None:
    rows_read, bad_rows = counts["rows_read"], counts["rows_set_aside"]
    if bad_rows > max_share * rows_read:
        raise ValueError(f"{name}: {bad_rows} of {rows_read} rows cannot be read, more than "
                         f"max_bad_rows_share={max_share:g} allows; quarantine.jsonl in the stage's .partial folder "
                         f"says why")


def scan(task: ScanTask) -> dict[str, int]:
    """Read a task's span into sorted runs and return its counts; if that is done already, return the stored counts.

    Raises ValueError at anything but rows.
    """
    if task.counts_path.exists():
        return json.loads(task.counts_path.read_text())
    with open(task.quarantine_path, "w", encoding="utf-8") as quarantine:
        log = ScanLog(task.name, quarantine, task.max_row_bytes)
        SCANS[task.table](task, log)
    is_of_hub = task.table == "records" and task.row_groups is None  # its size is a guess
    counts = dict(log.counts) | {"bytes_read": 0 if is_of_hub else task.size_bytes}
    write_json(task.counts_path, counts)
    pa.default_memory_pool().release_unused()  # else memory grows from task to task
    return counts


def _scan_posts(task: ScanTask, log: ScanLog) -> None:
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


def _scan_votes(task: ScanTask, log: ScanLog) -> None:
    votes = upvote_columns(read_rows(task.path, task.span, log), log)
    votes = votes.append_column("source", constant_column(task.source, len(votes)))
    votes = add_key_column(votes, post_keys(task.site, task.seed, votes["id"].to_numpy()))
    write_run(task.run_path("votes"), votes, VOTE_ORDER, task.parts)


def _scan_records(task: ScanTask, log: ScanLog) -> None:
    for stale in task.folder.glob(f"record*-{task.number:05d}-*"):
        stale.unlink()
    records = ((number, record, text_length(record))
               for number, record in read_records(task.name, task.row_groups, log))
    for number, (batch, _) in enumerate(group_by_size(records, itemgetter(2), SPAN_BYTES)):
        runs = task.run_path("records", number), task.run_path("record_sizes", number)
        write_run_with_sizes(*runs, _record_table(batch, task), RECORD_ORDER, task.parts)


def _record_table(batch: list[tuple[int, dict, int]], task: ScanTask) -> pa.Table:
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
