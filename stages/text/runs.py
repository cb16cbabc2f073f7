"""Sorting more rows than memory holds: sorted runs on disk, then ranges of the key that fit in memory one by one.

The result is one order over all rows, whatever the sizes below are; they only bound memory: about three times
RUN_BYTES while rows come in, and RANGE_BYTES + MARK_BYTES a run, plus the rows of one key, while ranges go out.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

RUN_BYTES = 64 << 20
RANGE_BYTES = 64 << 20
MARK_BYTES = 64 << 10
ROW_OVERHEAD_BYTES = 200


class Runs:
    """Rows of `schema`, to be had back in the order of the columns `order`; the first of these is the (int64) key."""

    def __init__(self, folder: Path, schema: pa.Schema, order: list[str]):
        folder.mkdir(parents=True)
        self.folder, self.schema, self.order = folder, schema, order
        self.paths: list[Path] = []
        self.marks: list[np.ndarray] = []  # one key a MARK_BYTES of each run: where to cut ranges
        self._clear()

    def _clear(self) -> None:
        self.columns: list[list] = [[] for _ in self.schema]
        self.sizes: list[int] = []
        self.held = 0

    def add(self, row: tuple, size: int = 0) -> None:
        """Take in one row; `size` is the length of its texts."""
        for column, value in zip(self.columns, row, strict=True):
            column.append(value)
        self.sizes.append(size + ROW_OVERHEAD_BYTES)
        self.held += self.sizes[-1]
        if self.held >= RUN_BYTES:
            self._spill()

    def _spill(self) -> None:
        table = pa.table(self.columns, schema=self.schema)
        order = self._sorted_indices(table)
        table = table.take(order).combine_chunks()
        filled = np.cumsum(np.asarray(self.sizes)[order.to_numpy()])
        marked = np.searchsorted(filled, np.arange(MARK_BYTES, filled[-1], MARK_BYTES))
        self.marks.append(table[self.order[0]].to_numpy()[marked])
        path = self.folder / f"run-{len(self.paths):05d}.arrow"
        with pa.ipc.new_file(str(path), self.schema) as writer:
            writer.write_table(table)
        self.paths.append(path)
        self._clear()

    def _sorted_indices(self, table: pa.Table) -> pa.Array:
        return pc.sort_indices(table, sort_keys=[(name, "ascending") for name in self.order])

    def ranges(self) -> Iterator[pa.Table]:
        """All rows in order; every key's rows lie in one table."""
        if self.sizes:
            self._spill()
        if not self.paths:
            return
        marks = np.sort(np.concatenate(self.marks))
        cuts = np.unique(marks[::max(1, RANGE_BYTES // MARK_BYTES)][1:]).tolist()
        for low, high in zip([None, *cuts], [*cuts, None], strict=True):
            table = pa.concat_tables([self._slice(path, low, high) for path in self.paths])
            if len(table):
                yield table.take(self._sorted_indices(table))

    def _slice(self, path: Path, low: int | None, high: int | None) -> pa.Table:
        # Opened anew for each range: a big dump has more runs than a process may hold open files.
        with pa.memory_map(str(path)) as mapped:
            table = pa.ipc.open_file(mapped).read_all()
        keys = table[self.order[0]].to_numpy()
        first = 0 if low is None else int(np.searchsorted(keys, low))
        last = len(keys) if high is None else int(np.searchsorted(keys, high))
        return table.slice(first, last - first)
