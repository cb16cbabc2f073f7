"""The end of a series (JSONL): last metrics, a sample answer. Reads the last kilobytes only, however long it is."""

import json
from pathlib import Path
from typing import Any

TAIL_BYTES = 256 << 10
COUNTERS = ("iteration", "step", "epoch")


def read_last_rows(path: Path) -> tuple[list[dict], list[str]]:
    """The rows within the last TAIL_BYTES, oldest first, and a line for each thing that is wrong with them.

    A last line without its end is a row that is being written at this moment, or was when the machine went down.
    """
    with open(path, "rb") as stream:
        begin = max(0, stream.seek(0, 2) - TAIL_BYTES)
        stream.seek(begin)
        lines = stream.read(TAIL_BYTES).split(b"\n")
    found = [_row(line) for line in lines[1 if begin else 0:] if line.strip()]
    bad = sum(row is None for row in found)
    return [row for row in found if row is not None], [f"{path.name}: {bad} lines at its end are no rows"] * bool(bad)


def latest_values(rows: list[dict]) -> dict[str, dict[str, Any]]:
    """The newest value of each number, with the step or iteration it is of: validation comes more rarely than loss."""
    found = {}
    for row in rows:
        counter = next((name for name in COUNTERS if name in row), None)
        at = {counter: row[counter]} if counter else {}
        found |= {key: {"value": value} | at for key, value in row.items()
                  if key not in COUNTERS and isinstance(value, int | float)}
    return found


def _row(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
