"""Read and write series as JSON lines, one row a step. A killed and resumed run holds each row once."""

import json
from pathlib import Path

from stages.runtime.files import write_text

HISTORY_FILES = ("history.jsonl", "timing.jsonl")


def append_row(path: Path, row: dict) -> None:
    """Append one row to the file."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(format_row(row))


def format_row(row: dict) -> str:
    """Format a row as a line of the file."""
    return json.dumps(row) + "\n"


def read_rows(path: Path) -> list[dict]:
    """Read all rows, oldest first; an empty list if there is no file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def truncate_after(path: Path, last: int, count: str = "iteration") -> None:
    """Drop the rows whose `count` is above `last`, a checkpoint's, and a last line that a kill cut short."""
    if not path.exists():
        return
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            break
        if row[count] <= last:
            lines.append(line + "\n")
    write_text(path, "".join(lines))


def read_history(artifact: Path) -> list[dict]:
    """Read all numbers that a training logged; an empty list if the model was not trained here."""
    return [row for name in HISTORY_FILES for row in read_rows(Path(artifact) / name)]
