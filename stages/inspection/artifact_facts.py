"""Describe one artifact, finished or not: manifest, staleness, damage, ancestry, and the contents of its files."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from stages.inspection.jsonl_facts import latest_values, read_last_rows
from stages.inspection.parquet_facts import read_table_facts
from stages.inspection.safetensors_facts import read_weight_facts
from stages.render.terminal import truncate_value
from stages.runs.lineage import diff_from_defaults, find_stale_reasons, trace_ancestry
from stages.runs.listing import last_write_time
from stages.runtime.manifest import find_damaged_files, read_record

CHECKPOINTS = "checkpoints"
HISTORY, SAMPLES = "history.jsonl", "samples.jsonl"
ADAPTER_KEYS = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "base_model_name_or_path")
MODEL_KEYS = ("architectures", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
              "num_key_value_heads", "vocab_size", "max_position_embeddings")
CONFIG_KEYS = {"adapter_config.json": ADAPTER_KEYS, "config.json": MODEL_KEYS}


def describe_artifact(folder: Path) -> dict[str, Any]:
    """Collect everything there is to say about an artifact, finished or not; ArtifactError if it is not one."""
    record = read_record(folder)
    contents = _read_contents(folder)
    problems = [*record.problems, *find_damaged_files(record), *contents.pop("problems")]
    manifest = {key: value for key, value in record.manifest.items() if key != "files"}
    return {"artifact": str(folder), "state": record.state, "stale": find_stale_reasons(record), "problems": problems,
            "last_written": last_write_time(folder), "manifest": manifest, "settings": diff_from_defaults(record),
            "ancestry": trace_ancestry(record), **contents}


def _read_contents(folder: Path) -> dict[str, Any]:
    """Describe the files that exist now; what cannot be read is a line in `problems`."""
    all_files, problems = _list_files(folder), []
    files = _drop_older_checkpoints(all_files)
    tables = [read_table_facts(name, parts) for name, parts in _group_tables(folder, files).items()]
    weights = [read_weight_facts(str(file.relative_to(folder)), file, size_bytes)
               for file, size_bytes in files.items() if file.suffix == ".safetensors"]
    problems += [line for facts in (*tables, *weights) for line in facts.pop("problems")]
    return {"files": {"count": len(all_files), "bytes": sum(all_files.values())},
            "configs": _read_configs(folder, files, problems), "weights": weights, "tables": tables,
            "last_metrics": latest_values(_read_rows(folder / HISTORY, problems)),
            "sample": truncate_value((_read_rows(folder / SAMPLES, problems) or [None])[-1]), "problems": problems}


def _list_files(folder: Path) -> dict[Path, int]:
    """Return all files with their bytes."""
    files = {}
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for file in (Path(parent, name) for name in sorted(names)):
            with suppress(OSError):  # a running stage deletes its older checkpoints
                files |= {file: file.stat().st_size} if file.is_file() else {}
    return files


def _drop_older_checkpoints(files: dict[Path, int]) -> dict[Path, int]:
    """Keep all files but those of checkpoints other than the newest one."""
    checkpoints = {file: next((parent for parent in file.parents if parent.parent.name == CHECKPOINTS), None)
                   for file in files}
    newest: dict[Path, Path] = {}
    for checkpoint in filter(None, checkpoints.values()):
        newest[checkpoint.parent] = max(checkpoint, newest.get(checkpoint.parent, checkpoint), key=_checkpoint_number)
    return {file: size_bytes for file, size_bytes in files.items()
            if (checkpoint := checkpoints[file]) is None or checkpoint == newest[checkpoint.parent]}


def _checkpoint_number(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _group_tables(folder: Path, files: dict[Path, int]) -> dict[str, dict[Path, int]]:
    """Group the parts of a table, by folder."""
    tables: dict[str, dict[Path, int]] = {}
    for file, size_bytes in files.items():
        if file.suffix == ".parquet":
            name = file.with_name("part-*.parquet") if file.name.startswith("part-") else file
            tables.setdefault(str(name.relative_to(folder)), {})[file] = size_bytes
    return tables


def _read_configs(folder: Path, files: dict[Path, int], problems: list[str]) -> list[dict]:
    """Read the main values of each adapter's and model's own configuration."""
    configs = []
    for file in files:
        if keys := CONFIG_KEYS.get(file.name):
            name = str(file.relative_to(folder))
            try:
                config = json.loads(file.read_text(encoding="utf-8"))
                configs.append({"name": name} | {key: config[key] for key in keys if key in config})
            except (OSError, ValueError, TypeError, RecursionError) as error:
                problems.append(f"{name} cannot be read: {error}")
    return configs


def _read_rows(path: Path, problems: list[str]) -> list[dict]:
    if not path.exists():
        return []
    try:
        rows, damage = read_last_rows(path)
    except OSError as error:
        rows, damage = [], [f"{path.name} cannot be read: {error}"]
    problems += damage
    return rows
