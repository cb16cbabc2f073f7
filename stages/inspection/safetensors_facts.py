"""Read names, types and shapes of the tensors in a safetensors file from its header; no weight is read."""

import re
from math import prod
from pathlib import Path

from stages.model_files.safetensors_header import read_header

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def read_weight_facts(name: str, path: Path, size_bytes: int) -> dict:
    """Return the number of parameters and the tensors, with those of all layers as one row with a count.

    A truncated file, or one of another format, is a line in `problems`; shapes are given as far as they are known.
    """
    facts = {"name": name, "bytes": size_bytes, "parameters": 0, "tensors": [], "problems": []}
    try:
        header, expected_bytes = read_header(path)
        facts["tensors"] = _group_tensors(header)
        facts["parameters"] = sum(row["count"] * prod(row["shape"]) for row in facts["tensors"])
    except (OSError, ValueError, RecursionError) as error:
        facts["problems"].append(f"{name} cannot be read: {error}")
        return facts
    if expected_bytes != size_bytes:
        facts["problems"].append(f"{name} is not whole: it has {size_bytes:,} of {expected_bytes:,} bytes")
    return facts


def _group_tensors(header: dict[str, dict]) -> list[dict]:
    """Count tensors of one type and shape whose names differ only in numbers, as one row with `*` for the number."""
    groups: dict[tuple, dict] = {}
    for name, entry in header.items():
        pattern, shape = NUMBER.sub("*", name), entry["shape"]
        row = {"name": pattern, "dtype": str(entry["dtype"]), "shape": shape, "count": 0}
        groups.setdefault((pattern, row["dtype"], *shape), row)["count"] += 1
    return list(groups.values())
