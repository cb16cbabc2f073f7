"""Names, types and shapes of the tensors in a safetensors file, from its header alone: no weight is read.

A file begins with the header's length (8 bytes, little-endian) and the header, JSON: {name: {dtype, shape,
data_offsets: [begin, end] in bytes after the header}}.
"""

import json
import re
from math import prod
from pathlib import Path

MOST_HEADER_BYTES = 100_000_000  # the format's own limit
NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def read_weight_facts(name: str, path: Path, size_bytes: int) -> dict:
    """Parameters and `tensors`: alike ones (of each layer, say) as one row with `*` for the number, counted.

    A file that is cut off or no safetensors file is told in `problems`, with the shapes as far as they are known.
    """
    facts = {"name": name, "bytes": size_bytes, "parameters": 0, "tensors": [], "problems": []}
    try:
        header, end = _header(path)
        facts["tensors"] = _alike(header)
        facts["parameters"] = sum(row["count"] * prod(row["shape"]) for row in facts["tensors"])
    except (OSError, ValueError, RecursionError) as error:
        facts["problems"].append(f"{name} cannot be read: {error}")
        return facts
    promised = end + max((entry["data_offsets"][1] for entry in header.values()), default=0)
    if promised != size_bytes:
        facts["problems"].append(f"{name} is not whole: it has {size_bytes:,} of {promised:,} bytes")
    return facts


def _header(path: Path) -> tuple[dict[str, dict], int]:
    """The header without its remarks, and where it ends."""
    with open(path, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MOST_HEADER_BYTES:
            raise ValueError("it is not a safetensors file")
        text = stream.read(length)
    if not length or len(text) < length:
        raise ValueError("it is cut off in its header")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise ValueError("it is not a safetensors file")
    header.pop("__metadata__", None)
    if not all(map(_is_entry, header.values())):
        raise ValueError("its header does not say what its tensors are")
    return header, 8 + length


def _is_entry(entry: object) -> bool:
    """Whether this is a tensor's dtype, shape and place."""
    lists = [entry.get(key) for key in ("shape", "data_offsets")] if isinstance(entry, dict) else [None]
    whole = all(isinstance(found, list) and all(isinstance(n, int) for n in found) for found in lists)
    return whole and len(lists[-1]) == 2 and "dtype" in entry


def _alike(header: dict[str, dict]) -> list[dict]:
    """Tensors whose names differ in numbers only, and whose type and shape are the same, as one row."""
    found: dict[tuple, dict] = {}
    for name, entry in header.items():
        pattern, shape = NUMBER.sub("*", name), entry["shape"]
        row = {"name": pattern, "dtype": str(entry["dtype"]), "shape": shape, "count": 0}
        found.setdefault((pattern, row["dtype"], *shape), row)["count"] += 1
    return list(found.values())
