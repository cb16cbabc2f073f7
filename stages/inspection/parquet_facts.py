"""What a Parquet table holds, told from its metadata and its first rows: the cost does not grow with the table.

Row counts, and least, most and nulls of plain number columns, are those of all rows (the writer put them into the
metadata); everything else is of the first rows. Posts and pairs lie in shuffled order, so those are a fair sample.
"""

from collections.abc import Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.terminal import truncate_value

SAMPLE_ROWS, SAMPLE_BYTES, BATCH_ROWS = 1000, 16 << 20, 8
HEAD_ROWS = 2
NUMBERS = ("INT32", "INT64", "FLOAT", "DOUBLE")  # as Parquet stores them; a date is one of them, too
UNREADABLE = (pa.ArrowException, OSError, ValueError)


def read_table_facts(name: str, files: dict[Path, int]) -> dict:
    """Facts of one table in one or more files (with their bytes) of one schema.

    A file that cannot be read is a line in `problems`; the rest is told without it.
    """
    facts: dict[str, Any] = {"name": name, "files": len(files), "rows": 0, "row_groups": 0,
                             "bytes": sum(files.values()), "problems": []}
    schema, sample, bounds = None, [], {}
    for file in files:
        try:
            with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:  # a page at a time, no group
                facts["rows"] += table.metadata.num_rows
                facts["row_groups"] += table.metadata.num_row_groups
                _widen(bounds, table.metadata)
                schema = schema or table.schema_arrow
                sample = sample or _first_rows(table)
        except UNREADABLE as error:
            facts["problems"].append(f"{file.name} cannot be read: {error}")
    whole = {} if facts["problems"] else bounds  # those of some of the rows would be no bounds
    facts["sample_rows"] = len(sample)
    facts["columns"] = [_column(field, [row[field.name] for row in sample], whole) for field in schema or ()]
    facts["head"] = [{key: truncate_value(value) for key, value in row.items()} for row in sample[:HEAD_ROWS]]
    return facts


def _first_rows(table: pq.ParquetFile) -> list[dict]:
    """At most SAMPLE_ROWS rows and about SAMPLE_BYTES: a question may be megabytes long."""
    rows, held = [], 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        rows += batch.to_pylist()
        held += batch.nbytes
        if len(rows) >= SAMPLE_ROWS or held >= SAMPLE_BYTES:
            break
    return rows[:SAMPLE_ROWS]


def _widen(bounds: dict[str, dict | None], about: pq.FileMetaData) -> None:
    """Lay a file's least, most and nulls over those so far; None where some group does not say."""
    for group in map(about.row_group, range(about.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name, said = column.path_in_schema, column.statistics if column.physical_type in NUMBERS else None
            if said is None or not said.has_min_max or not said.has_null_count or not _is_number(said.min):
                bounds[name] = None
            elif so_far := bounds.setdefault(name, {"least": said.min, "most": said.max, "nulls": 0}):
                so_far.update(least=min(so_far["least"], said.min) + 0, most=max(so_far["most"], said.max) + 0,
                              nulls=so_far["nulls"] + said.null_count)  # + 0: a least zero is stored as -0.0


def _column(field: pa.Field, values: list, bounds: dict[str, dict | None]) -> dict:
    """Name, type, and least, most and mean of what `of` names: the values, their characters or their items."""
    present = [value for value in values if value is not None]
    kind = "characters" if _all(present, str) else "items" if _all(present, list) else "value"
    numbers = [len(value) for value in present] if kind != "value" else [v for v in present if _is_number(v)]
    facts = {"name": field.name, "type": str(field.type), "of": kind, "nulls": len(values) - len(present),
             "bounds_from": "sample"}
    if numbers:
        facts |= {"least": min(numbers), "most": max(numbers), "mean": fmean(numbers)}
    if said := bounds.get(field.name):
        facts |= said | {"bounds_from": "all rows"}
    return facts


def _all(values: Iterable, kind: type) -> bool:
    values = list(values)
    return bool(values) and all(isinstance(value, kind) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
