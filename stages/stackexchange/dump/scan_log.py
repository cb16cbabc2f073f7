"""Count what is read from a source, and write rows that cannot be used to the quarantine."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TextIO

ROWS_BEFORE_EARLY_STOP = 100_000


@dataclass
class ScanLog:
    """Counts, quarantine and limits of one scan.

    Counts: rows_read, rows_set_aside, `dropped: REASON`. Every row read is used, set aside or dropped.
    """

    name: str  # of the source, for messages
    quarantine: TextIO
    max_row_bytes: int
    max_bad_rows_share: float
    counts: Counter = field(default_factory=Counter)

    def set_aside(self, reason: str, offset: int, row_id: str | None) -> None:
        """Write a bad row's offset (in bytes, or the number of the record) and the reason to the quarantine."""
        self.counts["rows_set_aside"] += 1
        record = {"source": self.name, "offset": offset, "id": row_id, "reason": reason}
        self.quarantine.write(json.dumps(record, ensure_ascii=False) + "\n")

    def check(self) -> None:
        """Raise ValueError if too many rows were set aside so far, once enough are read to say so."""
        check_bad_rows(self.name, self.counts, self.max_bad_rows_share, ROWS_BEFORE_EARLY_STOP)


def check_bad_rows(name: str, counts: Counter, max_share: float, min_rows: int = 1) -> None:
    """Raise ValueError if more than `max_share` of at least `min_rows` rows were set aside."""
    rows_read, bad_rows = counts["rows_read"], counts["rows_set_aside"]
    if rows_read >= min_rows and bad_rows > max_share * rows_read:
        raise ValueError(f"{name}: {bad_rows} of {rows_read} rows cannot be read, more than "
                         f"max_bad_rows_share={max_share:g} allows; quarantine.jsonl in the stage's .partial folder "
                         f"says why")
