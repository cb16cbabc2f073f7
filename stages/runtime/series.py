"""Series as JSON lines, one a step, that a killed and resumed run holds once."""

import json
from pathlib import Path

from stages.reporting.curves import SERIES
from stages.runtime.artifact import write_text


def append(path: Path, row: dict) -> None:
    """One more line."""
    with open(path, "a", encoding="utf-8") as stream:
        stream.write(line(row))


def line(row: dict) -> str:
    """A row as it stands in the file."""
    return json.dumps(row) + "\n"


def rows_of(path: Path) -> list[dict]:
    """All rows, oldest first; none where there is no file."""
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def keep_until(path: Path, last: int, count: str = "iteration") -> None:
    """Drop lines whose `count` is after a checkpoint's, and one that a kill cut short."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(text)
        except json.JSONDecodeError:
            break
        if row[count] <= last:
            kept.append(text + "\n")
    write_text(path, "".join(kept))


def history_of(artifact: Path) -> list[dict]:
    """The rows of an artifact's series; none when it has none (a base that was not trained here)."""
    paths = [path for name in SERIES if (path := Path(artifact) / name).exists()]
    return [json.loads(line) for path in paths for line in path.read_text(encoding="utf-8").splitlines()]
