"""Runs: tables on disk that are sorted by a uint64 column `key`, so that all rows of a range of keys are found at once.

What is partitioned here is read back range by range, from every run a slice: memory holds a range, whatever the total.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

KEY = pa.field("key", pa.uint64())
POST_ORDER = ["key", "source", "home", "kind", "id", "offset"]
CLAIM_ORDER = ["key", "source", "id", "offset"]
RECORD_ORDER = ["key", "source", "number"]


def write_run(path: Path, table: pa.Table, order: list[str]) -> None:
    """Write `table` sorted by the columns `order` (the first is `key`), whole or not at all."""
    table = in_order(table, order).combine_chunks()
    with whole(path) as draft, pa.ipc.new_file(str(draft), table.schema) as writer:
        writer.write_table(table)


def in_order(table: pa.Table, order: list[str]) -> pa.Table:
    return table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in order]))


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A name to write to, this process's own, that becomes `path` at the end."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    yield draft
    os.replace(draft, path)


def slices(paths: list[Path], low: int, high: int, columns: list[str] | None = None) -> pa.Table:
    """All rows with low <= key < high, of these columns (None: all), not yet in order. At least one path."""
    return pa.concat_tables(_slice(path, low, high, columns) for path in paths)


def _slice(path: Path, low: int, high: int, columns: list[str] | None) -> pa.Table:
    # Opened anew each time: a big dump has more runs than a process may hold open files. The file's pages stay on disk
    # but for the slice.
    with pa.memory_map(str(path)) as mapped:
        table = pa.ipc.open_file(mapped).read_all()
    keys = table["key"].to_numpy()
    first = np.searchsorted(keys, np.uint64(low))
    last = np.searchsorted(keys, np.uint64(high - 1), "right")
    table = table.slice(int(first), int(last - first))
    return table.select(columns) if columns else table
