"""Read and write no_model.json of an artifact without a reward model, as there was too little to train one on."""

import json
from pathlib import Path

from stages.runtime.files import write_json

NO_MODEL = "no_model.json"


def write_no_model(folder: Path, reason: str) -> None:
    """Write no_model.json."""
    write_json(folder / NO_MODEL, {"reason": reason})


def read_no_model(folder: Path) -> str | None:
    """Return why the folder holds no model; None if it has no such file."""
    path = folder / NO_MODEL
    return json.loads(path.read_text(encoding="utf-8"))["reason"] if path.is_file() else None
