"""Read the end of a series (JSONL): the last metrics, a sample answer. The cost does not grow with the file."""

import json
from pathlib import Path
from typing import Any

TAIL_BYTES = 256 << 10
COUNTERS = ("iteration", "step", "epoch")


def read_last_rows(path: Path) -> tuple[list[dict], list[str]]:
    """Return the rows within the last TAIL_BYTES, oldest first, and the problems with them, one line each.

    A last line without its end is being written at this moment, or was when the machine went down.
    """
    with open(path, "rb") as stream:
        begin = max(0, stream.seek(0, 2) - TAIL_BYTES)
        stream.seek(begin)
        lines = stream.read(TAIL_BYTES).split(b"\n")
    rows = [_parse_row(line) for line in lines[1 if begin else 0:] if line.strip()]
    bad = sum(row is None for row in rows)
    return [row for row in rows if row is not None], [f"{path.name}: {bad} lines at its end are no rows"] * bool(bad)


def latest_values(rows: list[dict]) -> dict[str, dict[str, Any]]:
    """Return the newest value of each number and its step or iteration: validation is rarer than loss."""
    latest = {}
    for row in rows:
        counter = next((name for name in COUNTERS if name in row), None)
        at = {counter: row[counter]} if counter else {}
        latest |= {key: {"value": value} | at for key, value in row.items()
                   if key not in COUNTERS and isinstance(value, int | float)}
    return latest


def _parse_row(line: bytes) -> dict | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
