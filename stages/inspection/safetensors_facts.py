"""Read names, types and shapes of the tensors in a safetensors file from its header; no weight is read.

A file begins with the header's length (8 bytes, little-endian) and the header, JSON: {name: {dtype, shape,
data_offsets: [begin, end] in bytes after the header}}.
"""

import json
import re
from math import prod
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def read_weight_facts(name: str, path: Path, size_bytes: int) -> dict:
    """Return the number of parameters and the tensors, with those of all layers as one row with a count.

    A truncated file, or one of another format, is a line in `problems`; shapes are given as far as they are known.
    """
    facts = {"name": name, "bytes": size_bytes, "parameters": 0, "tensors": [], "problems": []}
    try:
        header, end = _read_header(path)
        facts["tensors"] = _group_tensors(header)
        facts["parameters"] = sum(row["count"] * prod(row["shape"]) for row in facts["tensors"])
    except (OSError, ValueError, RecursionError) as error:
        facts["problems"].append(f"{name} cannot be read: {error}")
        return facts
    expected_bytes = end + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if expected_bytes != size_bytes:
        facts["problems"].append(f"{name} is not whole: it has {size_bytes:,} of {expected_bytes:,} bytes")
    return facts


def _read_header(path: Path) -> tuple[dict[str, dict], int]:
    """Return the header without its metadata, and the offset of its end."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError("it is not a safetensors file")
        text = stream.read(length)
    if not length or len(text) < length:
        raise ValueError("it is cut off in its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("it is not a safetensors file")
    header.pop("__metadata__", None)
    if not all(map(_is_entry, header.values())):
        raise ValueError("its header does not describe its tensors")
    return header, 8 + length


def _is_entry(entry: object) -> bool:
    """Check for the dtype, shape and offsets of a tensor."""
    lists = [entry.get(key) for key in ("shape", "data_offsets")] if isinstance(entry, dict) else [None]
    are_integers = all(isinstance(value, list) and all(isinstance(n, int) for n in value) for value in lists)
    return are_integers and len(lists[-1]) == 2 and "dtype" in entry


def _group_tensors(header: dict[str, dict]) -> list[dict]:
    """Count tensors of one type and shape whose names differ only in numbers, as one row with `*` for the number."""
    groups: dict[tuple, dict] = {}
    for name, entry in header.items():
        pattern, shape = NUMBER.sub("*", name), entry["shape"]
        row = {"name": pattern, "dtype": str(entry["dtype"]), "shape": shape, "count": 0}
        groups.setdefault((pattern, row["dtype"], *shape), row)["count"] += 1
    return list(groups.values())
