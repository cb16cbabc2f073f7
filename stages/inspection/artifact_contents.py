"""What lies in the folder of an artifact, finished or not: tables, weights, the last metrics, a sample answer."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.inspection.jsonl_facts import latest_values, read_last_rows
from stages.inspection.parquet_facts import read_table_facts
from stages.inspection.safetensors_facts import read_weight_facts
from stages.render.terminal import truncate_value

CHECKPOINTS = "checkpoints"
HISTORY, SAMPLES = "history.jsonl", "samples.jsonl"
ADAPTER = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path")
MODEL = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
         "num_key_value_heads", "vocab_size", "max_position_embeddings")


def read_contents(folder: Path) -> dict[str, Any]:
    """Facts of the files that are there now; what cannot be read is a line in `problems`, and the rest is told."""
    everything, problems = _files(folder), []
    files = _without_older_checkpoints(everything)
    tables = [read_table_facts(name, found) for name, found in _tables(folder, files).items()]
    weights = [read_weight_facts(str(file.relative_to(folder)), file, count) for file, count in files.items()
               if file.suffix == ".safetensors"]
    problems += [line for facts in (*tables, *weights) for line in facts.pop("problems")]
    return {"files": {"count": len(everything), "bytes": sum(everything.values())},
            "configs": _configs(folder, files, problems), "weights": weights, "tables": tables,
            "last_metrics": latest_values(_rows(folder / HISTORY, problems)),
            "sample": truncate_value((_rows(folder / SAMPLES, problems) or [None])[-1]), "problems": problems}


def _files(folder: Path) -> dict[Path, int]:
    """All files with their bytes."""
    found = {}
    for place, folders, names in os.walk(folder):
        folders.sort()
        for file in (Path(place, name) for name in sorted(names)):
            with suppress(OSError):  # a stage at work deletes its older checkpoints
                found |= {file: file.stat().st_size} if file.is_file() else {}
    return found


def _without_older_checkpoints(files: dict[Path, int]) -> dict[Path, int]:
    """All files, but of `checkpoints/` those of the one with the largest number only."""
    checkpoints = {file: next((place for place in file.parents if place.parent.name == CHECKPOINTS), None)
                   for file in files}
    newest: dict[Path, Path] = {}
    for place in filter(None, checkpoints.values()):
        newest[place.parent] = max(place, newest.get(place.parent, place), key=_number)
    return {file: count for file, count in files.items()
            if (place := checkpoints[file]) is None or place == newest[place.parent]}


def _number(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _tables(folder: Path, files: dict[Path, int]) -> dict[str, dict[Path, int]]:
    """Parts of one table together, by the folder they lie in."""
    found: dict[str, dict[Path, int]] = {}
    for file, count in files.items():
        if file.suffix == ".parquet":
            named = file.with_name("part-*.parquet") if file.name.startswith("part-") else file
            found.setdefault(str(named.relative_to(folder)), {})[file] = count
    return found


def _configs(folder: Path, files: dict[Path, int], problems: list[str]) -> list[dict]:
    """The telling values of each adapter's and model's own configuration."""
    found = []
    for file in files:
        if keys := {"adapter_config.json": ADAPTER, "config.json": MODEL}.get(file.name):
            name = str(file.relative_to(folder))
            try:
                said = json.loads(file.read_text(encoding="utf-8"))
                found.append({"name": name} | {key: said[key] for key in keys if key in said})
            except (OSError, ValueError, TypeError, RecursionError) as error:
                problems.append(f"{name} cannot be read: {error}")
    return found


def _rows(path: Path, problems: list[str]) -> list[dict]:
    if not path.exists():
        return []
    try:
        rows, damage = read_last_rows(path)
    except OSError as error:
        rows, damage = [], [f"{path.name} cannot be read: {error}"]
    problems += damage
    return rows
