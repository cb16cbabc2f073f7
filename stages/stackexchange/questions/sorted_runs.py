"""Runs: tables on disk, sorted by a uint64 column `key`, and cut into parts: equal ranges of keys, a batch each.

What many spans left is read back part by part, from each run one batch: memory holds a part, whatever the total.
"""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.files import atomic_path
from stages.stackexchange.questions.hash_order import first_key

KEY = pa.field("key", pa.uint64())
POST_ORDER = ["key", "source", "home", "kind", "id", "offset"]
CLAIM_ORDER = ["key", "source", "id", "offset"]
RECORD_ORDER = ["key", "source", "number"]


def with_keys(table: pa.Table, keys: np.ndarray) -> pa.Table:
    """`table` with its `key` in front."""
    return table.add_column(0, KEY, pa.array(keys))


def write_run(path: Path, table: pa.Table, order: list[str], parts: int) -> None:
    """Write `table` sorted by the columns `order` (the first is `key`), whole or not at all."""
    table = in_order(table, order)
    firsts = np.array([first_key(part, parts) for part in range(parts)], dtype=np.uint64)
    cuts = [*np.searchsorted(table["key"].to_numpy(), firsts).tolist(), len(table)]
    with atomic_path(path) as draft, pa.ipc.new_file(str(draft), table.schema) as writer:
        for first, last in pairwise(cuts):
            writer.write_batch(_batch(table.slice(first, last - first)))


def write_sized(path: Path, sizes: Path, table: pa.Table, order: list[str], parts: int) -> None:
    """`write_run`, and beside it how much stands under each key: `size` in bytes, `posts`."""
    write_run(sizes, table.select(["key", "size", "posts"]), ["key"], parts)
    write_run(path, table.drop_columns("posts"), order, parts)


def in_order(table: pa.Table, order: list[str]) -> pa.Table:
    return table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in order]))


def _batch(table: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], schema=table.schema)


def part_of(runs: list[Path], part: int, keep: Callable[[np.ndarray], np.ndarray] | None = None) -> pa.Table:
    """The rows of one part, not yet in order; `keep` says of each key whether it is wanted. At least one run."""
    return pa.concat_tables(_piece(run, part, keep) for run in runs)


def _piece(run: Path, part: int, keep: Callable[[np.ndarray], np.ndarray] | None) -> pa.Table:
    # Read, not mapped: of a mapped file whole stretches around what is used count as memory. Opened anew each time: a
    # big dump has more runs than a process may hold open files.
    with pa.OSFile(str(run)) as stream:
        batch = pa.ipc.open_file(stream).get_batch(part)
    if keep is not None:
        wanted = keep(batch["key"].to_numpy())
        batch = batch if wanted.all() else batch.filter(pa.array(wanted))
    return pa.Table.from_batches([batch])
