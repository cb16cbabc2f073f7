"""Describe one artifact, finished or not: manifest, staleness, damage, ancestry, and the contents of its files."""

import json
import os
import re
from contextlib import suppress
from math import prod
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from stages.artifacts.artifact import find_damaged_files
from stages.artifacts.lineage import diff_from_defaults, find_stale_reasons, trace_ancestry
from stages.artifacts.manifest import read_record
from stages.artifacts.run_facts import last_write_time
from stages.model_files.safetensors_header import read_header
from stages.render.terminal import truncate_value
from stages.runtime.files import read_last_lines

CHECKPOINT = re.compile(r"(.*)/checkpoint-(\d+)/")
HISTORY, SAMPLES = "history.jsonl", "samples.jsonl"
COUNTERS = ("iteration", "step", "epoch")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
SAMPLE_ROWS = 1000
HEAD_ROWS = 2


def describe_artifact(folder: Path) -> dict[str, Any]:
    """Collect everything there is to say about an artifact, finished or not; ArtifactError if it is not one."""
    record = read_record(folder)
    problems = [*record.problems, *find_damaged_files(folder, record.manifest.get("files", {}))]
    manifest = {key: value for key, value in record.manifest.items() if key != "files"}
    return {"artifact": str(folder), "state": record.state, "stale": find_stale_reasons(record), "problems": problems,
            "last_written": last_write_time(folder), "manifest": manifest, "settings": diff_from_defaults(record),
            "ancestry": trace_ancestry(record), **_read_contents(folder, problems)}


def read_last_rows(path: Path, problems: list[str]) -> list[dict]:
    """Return the last rows of a series (JSONL), oldest first; [] without one.

    A last line without its end is being written at this moment, or was when the machine went down: it is a problem.
    """
    rows = [_parse_row(line.encode("utf-8", "surrogateescape"))
            for line in read_last_lines(path, errors="surrogateescape")]  # not UTF-8: no row
    if None in rows:
        problems.append(f"{path.name}: {rows.count(None)} lines at its end are no rows")
    return [row for row in rows if row is not None]


def _read_contents(folder: Path, problems: list[str]) -> dict[str, Any]:
    """Describe the files that exist now; what cannot be read is a line in `problems`."""
    all_files = _list_files(folder)
    files, samples = _drop_older_checkpoints(all_files), read_last_rows(folder / SAMPLES, problems)
    return {"files": {"count": len(all_files), "bytes": sum(all_files.values())},
            "weights": [_read_weights(str(file.relative_to(folder)), file, size_bytes, problems)
                        for file, size_bytes in files.items() if file.suffix == ".safetensors"],
            "tables": [read_table_facts(str(name.relative_to(folder)), parts, problems)
                       for name, parts in _group_tables(files).items()],
            "last_metrics": _find_latest(read_last_rows(folder / HISTORY, problems)),
            "sample": truncate_value(samples[-1]) if samples else None}


def _list_files(folder: Path) -> dict[Path, int]:
    """Return all files with their bytes."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for file in (Path(parent, name) for name in sorted(names)):
            with suppress(OSError):  # a running stage deletes its older checkpoints
                files |= {file: file.stat().st_size} if file.is_file() else {}
    return files


def _drop_older_checkpoints(files: dict[Path, int]) -> dict[Path, int]:
    """Keep all files but those that a newer checkpoint of the same training has, too."""
    newest = {CHECKPOINT.sub(r"\1/checkpoint/", path.as_posix()): path for path in sorted(files, key=_step)}
    return {path: files[path] for path in newest.values()}


def _step(path: Path) -> int:
    match = CHECKPOINT.match(path.as_posix())
    return int(match[2]) if match else 0


def _group_tables(files: dict[Path, int]) -> dict[Path, dict[Path, int]]:
    """Group the parts of a table, by the pattern of their names."""
    tables: dict[Path, dict[Path, int]] = {}
    for file, size_bytes in files.items():
        if file.suffix == ".parquet":
            name = file.with_name("part-*.parquet") if file.name.startswith("part-") else file
            tables.setdefault(name, {})[file] = size_bytes
    return tables


def _read_weights(name: str, path: Path, size_bytes: int, problems: list[str]) -> dict:
    """Return the tensors of a safetensors file, those whose names differ only in numbers as one row with a count.

    A truncated file, or one of another format, is a problem; shapes are given as far as they are known.
    """
    rows: dict[tuple, dict] = {}
    try:
        header, expected_bytes = read_header(path)
        if expected_bytes != size_bytes:
            problems.append(f"{name} is not whole: it has {size_bytes:,} of {expected_bytes:,} bytes")
        for tensor, entry in header.items():
            row = {"name": NUMBER.sub("*", tensor), "dtype": str(entry["dtype"]), "shape": entry["shape"], "count": 0}
            rows.setdefault((row["name"], row["dtype"], *row["shape"]), row)["count"] += 1
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{name} cannot be read: {error}")
    tensors = list(rows.values())
    parameters = sum(row["count"] * prod(row["shape"]) for row in tensors)
    return {"name": name, "bytes": size_bytes, "parameters": parameters, "tensors": tensors}


def _find_latest(rows: list[dict]) -> dict[str, dict[str, Any]]:
    """Return the newest value of each number and its step or iteration: validation is rarer than loss."""
    latest = {}
    for row in rows:
        at = next(({name: row[name]} for name in COUNTERS if name in row), {})
        latest |= {key: {"value": value} | at for key, value in row.items()
                   if key not in COUNTERS and isinstance(value, int | float)}
    return latest


def _parse_row(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def read_table_facts(name: str, files: dict[Path, int], problems: list[str]) -> dict:
    """Describe one table in one or more files (with their bytes) of one schema; add a problem for each damaged file.

    The number of rows is that of all files. Everything else is that of the first rows, so that the cost does not grow
    with the table. Posts and pairs are in shuffled order, so the first rows are a fair sample.
    """
    facts: dict[str, Any] = {"name": name, "files": len(files), "rows": 0, "bytes": sum(files.values())}
    schema, sample = [], []
    for file in files:
        try:
            with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 20) as table:  # reads pages, not row groups
                facts["rows"] += table.metadata.num_rows
                schema = schema or table.schema_arrow
                batches = table.iter_batches(batch_size=SAMPLE_ROWS, use_threads=False)
                sample = sample or next((batch.to_pylist() for batch in batches), [])
        except (pa.ArrowException, OSError, ValueError) as error:
            problems.append(f"{file.name} cannot be read: {error}")
    return facts | {
        "sample_rows": len(sample),
        "columns": [_describe_column(field, [row[field.name] for row in sample]) for field in schema],
        "head": [{key: truncate_value(value) for key, value in row.items()} for row in sample[:HEAD_ROWS]]}


def _describe_column(field: pa.Field, values: list) -> dict:
    """Return name, type, nulls, and least, most and mean of the values, their characters or their items (see `of`)."""
    present = [value for value in values if value is not None]
    facts = {"name": field.name, "type": str(field.type), "of": "value", "nulls": len(values) - len(present)}
    numbers = [value for value in present if isinstance(value, int | float) and not isinstance(value, bool)]
    for kind, noun in ((str, "characters"), (list, "items")):
        if present and all(isinstance(value, kind) for value in present):
            facts["of"], numbers = noun, list(map(len, present))
    return facts | ({"least": min(numbers), "most": max(numbers), "mean": fmean(numbers)} if numbers else {})
