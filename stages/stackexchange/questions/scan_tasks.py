"""Plan a run of the posts stage: unpack the sources' tables, and split them into scan tasks and parts."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from stages.runtime.files import check_free_space, used_bytes, write_json
from stages.stackexchange.dump.archives import SCRATCH, Table, required_bytes, unpack_table
from stages.stackexchange.dump.hub_tables import list_parquet_files, split_row_groups
from stages.stackexchange.dump.sources import Source
from stages.stackexchange.dump.xml_table import split_spans
from stages.stackexchange.questions.join import SourceInfo
from stages.stackexchange.questions.scan import RecordScan, ScanTask, XmlScan

SPAN_BYTES = 32 << 20
MAX_NAMES = 4  # of dumps, in a message
HUB_BYTES = 8 << 30  # assumed for a Hub data set, whose size is not known in advance


@dataclass(frozen=True)
class ScanPlan:
    """What a run reads, in which tasks, and how many parts it makes."""

    sources: list[SourceInfo]
    tasks: list[ScanTask]
    parts: int


def plan_scans(sources: list[Source], scratch: Path, *, with_votes: bool, part_bytes: int, **options) -> ScanPlan:
    """Unpack what is packed into `scratch`, and split all tables into tasks.

    Results in `scratch` of a run with another plan are deleted.

    Args:
        options: seed, max_bad_rows_share, max_row_bytes and exclude of `ScanTask`.
    """
    tables_of = [[table for table in (source.posts, source.votes if with_votes else None) if table]
                 for source in sources]
    _check_scratch_space([table for tables in tables_of for table in tables], scratch)
    infos, tasks = [], []
    for number, source in enumerate(sources):
        tables = {table.name.lower(): unpack_table(table, scratch) for table in tables_of[number]}
        infos.append(SourceInfo(source.name, source.site or source.name, tables.get("posts", Path(source.name))))
        tasks += _split(source, tables, {"source": number, "folder": scratch, **options})
    text_bytes = sum(task.size_bytes for task in tasks if task.table != "votes")
    parts = max(1, -(-text_bytes // part_bytes))
    tasks = [replace(task, number=number, parts=parts) for number, task in enumerate(tasks)]
    _delete_other_plan(tasks, scratch)
    return ScanPlan(infos, tasks, parts)


def _check_scratch_space(tables: list[Table], scratch: Path) -> None:
    """Raise ValueError if there is too little room for all tables; what an earlier run left counts as theirs."""
    names = ", ".join(dict.fromkeys(table.path for table in tables[:MAX_NAMES])) + ", ..." * (len(tables) > MAX_NAMES)
    check_free_space(names, scratch, sum(map(required_bytes, tables)) - used_bytes(scratch), SCRATCH)


def _split(source: Source, tables: dict[str, Path], common: dict) -> Iterator[ScanTask]:
    if source.kind == "hub":
        yield RecordScan(name=source.name, row_groups=None, size_bytes=HUB_BYTES, **common)
    if source.kind == "parquet":
        for file in list_parquet_files(Path(source.name)):
            for groups, size_bytes in split_row_groups(file):
                yield RecordScan(name=str(file), row_groups=groups, size_bytes=size_bytes, **common)
    for table, path in tables.items():
        for span in split_spans(path, table, source.name, SPAN_BYTES):
            yield XmlScan(name=source.name, site=source.site, table=table, path=path, span=span, **common)


def _delete_other_plan(tasks: list[ScanTask], scratch: Path) -> None:
    plan, path = [str(task) for task in tasks], scratch / "plan.json"
    if not path.exists() or json.loads(path.read_text(encoding="utf-8")) != plan:
        for stale in scratch.iterdir():
            if stale.suffix != ".xml":  # unpacked tables stay valid
                stale.unlink()
        write_json(path, plan)
