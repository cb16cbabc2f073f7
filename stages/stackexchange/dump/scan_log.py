"""Count what is read from a source, and write rows that cannot be used to the quarantine."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO


@dataclass
class ScanLog:
    """Counts and quarantine of one scan.

    Counts: rows_read, rows_set_aside, `dropped: REASON`. Every row read is used, set aside or dropped.
    """

    name: str  # of the source, for messages
    quarantine: TextIO
    max_row_bytes: int
    counts: Counter = field(default_factory=Counter)

    def set_aside(self, reason: str, offset: int, row_id: str | None) -> None:
        """Write a bad row's offset (in bytes, or the number of the record) and the reason to the quarantine."""
        self.counts["rows_set_aside"] += 1
        record = {"source": self.name, "offset": offset, "id": row_id, "reason": reason}
        self.quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")
