"""A piece of a source, read on its own, in any process: what all kinds of them have in common.

A piece leaves its runs in a folder, quarantine-NUMBER.jsonl and, last, done-NUMBER.json with what was counted: where
that stands, it is not read again.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from stages.runtime.artifact import write_json
from stages.text.rows import Reading


@dataclass(frozen=True, kw_only=True)
class Piece:
    """`source` is its place in the list of the run's sources, `parts` how many its runs are cut into."""

    number: int
    source: int
    parts: int
    folder: Path
    seed: int
    max_bad_rows_share: float

    @property
    def done(self) -> Path:
        return self.folder / f"done-{self.number:05d}.json"

    @property
    def quarantine(self) -> Path:
        return self.folder / f"quarantine-{self.number:05d}.jsonl"

    def counted(self, name: str, max_row_bytes: int, bytes_read: int, fill: Callable[[Reading], None]
                ) -> dict[str, int]:
        """What is counted while `fill` leaves the runs, now or when this was done before."""
        if self.done.exists():
            return json.loads(self.done.read_text())
        with open(self.quarantine, "w", encoding="utf-8") as quarantine:
            reading = Reading(name, quarantine, max_row_bytes, self.max_bad_rows_share)
            fill(reading)
        counts = dict(reading.counts) | {"bytes_read": bytes_read}
        write_json(self.done, counts)
        return counts
