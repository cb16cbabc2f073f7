"""Read the header of a safetensors file; no weight is read.

A file begins with the header's length (8 bytes, little-endian) and the header, JSON: {name: {dtype, shape,
data_offsets: [begin, end] in bytes after the header}}.
"""

import json
from pathlib import Path

MAX_HEADER_BYTES = 100_000_000  # the format's own limit


def read_header(path: Path) -> tuple[dict[str, dict], int]:
    """Return the header without its metadata, and the size in bytes that the whole file must have.

    Raises ValueError for a file that is cut off in its header, or is of another format.
    """
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
    return header, 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)


def _is_entry(entry: object) -> bool:
    """Check for the dtype, shape and offsets of a tensor."""
    lists = [entry.get(key) for key in ("shape", "data_offsets")] if isinstance(entry, dict) else [None]
    are_integers = all(isinstance(value, list) and all(isinstance(n, int) for n in value) for value in lists)
    return are_integers and len(lists[-1]) == 2 and "dtype" in entry
