"""Describe a Parquet table from its metadata and first rows: the cost does not grow with the table.

The number of rows is that of all files; everything else is that of the first rows. Posts and pairs are in shuffled
order, so the first rows are a fair sample.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.render.terminal import truncate_value

SAMPLE_ROWS, SAMPLE_BYTES, BATCH_ROWS = 1000, 16 << 20, 8
HEAD_ROWS = 2


def read_table_facts(name: str, files: dict[Path, int], problems: list[str]) -> dict:
    """Describe one table in one or more files (with their bytes) of one schema; add a problem for each damaged file."""
    facts: dict[str, Any] = {"name": name, "files": len(files), "rows": 0, "bytes": sum(files.values())}
    schema, sample = [], []
    for file in files:
        try:
            with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:  # reads pages, not row groups
                facts["rows"] += table.metadata.num_rows
                schema = schema or table.schema_arrow
                sample = sample or _read_sample(table)
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.append(f"{file.name} cannot be read: {error}")
    return facts | {
        "sample_rows": len(sample),
        "columns": [_describe_column(field, [row[field.name] for row in sample]) for field in schema],
        "head": [{key: truncate_value(value) for key, value in row.items()} for row in sample[:HEAD_ROWS]]}


def _read_sample(table: pq.ParquetFile) -> list[dict]:
    """Read at most SAMPLE_ROWS rows and about SAMPLE_BYTES: a question may be megabytes long."""
    rows, size_bytes = [], 0
    for batch in table.iter_batches(batch_size=BATCH_ROWS, use_threads=False):
        rows += batch.to_pylist()
        size_bytes += batch.nbytes
        if len(rows) >= SAMPLE_ROWS or size_bytes >= SAMPLE_BYTES:
            break
    return rows[:SAMPLE_ROWS]


def _describe_column(field: pa.Field, values: list) -> dict:
    """Return name, type, nulls, and least, most and mean of the values, their characters or their items (see `of`)."""
    present = [value for value in values if value is not None]
    facts = {"name": field.name, "type": str(field.type), "of": "value", "nulls": len(values) - len(present)}
    numbers = [value for value in present if isinstance(value, int | float) and not isinstance(value, bool)]
    for kind, noun in ((str, "characters"), (list, "items")):
        if present and all(isinstance(value, kind) for value in present):
            facts["of"], numbers = noun, list(map(len, present))
    return facts | ({"least": min(numbers), "most": max(numbers), "mean": fmean(numbers)} if numbers else {})
