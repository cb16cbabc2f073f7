"""Describe a Parquet table from its metadata and first rows: the cost does not grow with the table.

Row counts and the bounds and nulls of plain number columns are those of all rows, from the metadata; everything else
is that of the first rows. Posts and pairs are in shuffled order, so the first rows are a fair sample.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.terminal import truncate_value

SAMPLE_ROWS, SAMPLE_BYTES, BATCH_ROWS = 1000, 16 << 20, 8
HEAD_ROWS = 2
NUMBER_TYPES = ("INT32", "INT64", "FLOAT", "DOUBLE")  # as Parquet stores them; dates are among them
READ_ERRORS = (pa.ArrowException, OSError, ValueError)


def read_table_facts(name: str, files: dict[Path, int]) -> dict:
    """Describe one table in one or more files (with their bytes) of one schema.

    A file that cannot be read is a line in `problems`.
    """
    facts: dict[str, Any] = {"name": name, "files": len(files), "rows": 0, "row_groups": 0,
                             "bytes": sum(files.values()), "problems": []}
    schema, sample, bounds = None, [], {}
    for file in files:
        try:
            with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:  # reads pages, not row groups
                facts["rows"] += table.metadata.num_rows
                facts["row_groups"] += table.metadata.num_row_groups
                _merge_bounds(bounds, table.metadata)
                schema = schema or table.schema_arrow
                sample = sample or _read_sample(table)
        except READ_ERRORS as error:
            facts["problems"].append(f"{file.name} cannot be read: {error}")
    bounds = {} if facts["problems"] else bounds  # bounds of some rows would be misleading
    facts["sample_rows"] = len(sample)
    facts["columns"] = [_describe_column(field, [row[field.name] for row in sample], bounds) for field in schema or ()]
    facts["head"] = [{key: truncate_value(value) for key, value in row.items()} for row in sample[:HEAD_ROWS]]
    return facts


def _read_sample(table: pq.ParquetFile) -> list[dict]:
    """Read at most SAMPLE_ROWS rows and about SAMPLE_BYTES: a question may be megabytes long."""
    rows, size_bytes = [], 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        rows += batch.to_pylist()
        size_bytes += batch.nbytes
        if len(rows) >= SAMPLE_ROWS or size_bytes >= SAMPLE_BYTES:
            break
    return rows[:SAMPLE_ROWS]


def _merge_bounds(bounds: dict[str, dict | None], metadata: pq.FileMetaData) -> None:
    """Extend the bounds and nulls of each column by those of a file; None if a row group lacks them."""
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for column in map(group.column, range(group.num_columns)):
            name = column.path_in_schema
            stats = column.statistics if column.physical_type in NUMBER_TYPES else None
            if stats is None or not stats.has_min_max or not stats.has_null_count or not _is_number(stats.min):
                bounds[name] = None
            elif total := bounds.setdefault(name, {"least": stats.min, "most": stats.max, "nulls": 0}):
                total.update(least=min(total["least"], stats.min) + 0, most=max(total["most"], stats.max) + 0,
                             nulls=total["nulls"] + stats.null_count)  # + 0: a minimum of zero is stored as -0.0


def _describe_column(field: pa.Field, values: list, bounds: dict[str, dict | None]) -> dict:
    """Return name, type, and least, most and mean of the values, their characters or their items (see `of`)."""
    present = [value for value in values if value is not None]
    kind = "characters" if _all_are(present, str) else "items" if _all_are(present, list) else "value"
    numbers = [len(value) for value in present] if kind != "value" else [v for v in present if _is_number(v)]
    facts = {"name": field.name, "type": str(field.type), "of": kind, "nulls": len(values) - len(present),
             "bounds_from": "sample"}
    if numbers:
        facts |= {"least": min(numbers), "most": max(numbers), "mean": fmean(numbers)}
    if total := bounds.get(field.name):
        facts |= total | {"bounds_from": "all rows"}
    return facts


def _all_are(values: list, kind: type) -> bool:
    return bool(values) and all(isinstance(value, kind) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
