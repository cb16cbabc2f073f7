"""Documents of token ids on disk: written once, as an Arrow file, and read by number through a memory map.

Memory holds 8 bytes a document, whatever their tokens; `datasets.Dataset.from_file` opens the file as well.
"""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from stages.runtime.files import atomic_path

ROWS_AT_ONCE = 1000
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("prompt_tokens", pa.int32())])


class Documents:
    """Documents in a file; `lengths` [D] in tokens, `prompt_tokens` [D] that stand before the answer."""

    def __init__(self, path: Path):
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        lists = [chunk for chunk in table["input_ids"].chunks if len(chunk)]
        self._tokens = [chunk.values.to_numpy() for chunk in lists]  # each batch's, flat; a view of the map
        self._offsets = [chunk.offsets.to_numpy() for chunk in lists]
        self._firsts = np.cumsum([0, *map(len, lists)])
        self.lengths = np.concatenate([np.diff(offsets) for offsets in self._offsets] or [np.zeros(0, int)])
        self.prompt_tokens = table["prompt_tokens"].to_numpy()

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Token ids of one document, from `start` to `stop`."""
        batch = int(np.searchsorted(self._firsts, document, side="right")) - 1
        first, end = self._offsets[batch][document - self._firsts[batch] :][:2]
        return self._tokens[batch][first + start : min(first + stop, end)]


def write_documents(path: Path, documents: Iterable[tuple[list[int], list[int]]], max_tokens: int | None) -> Documents:
    """Write prompts with answers to `path`, whole or not at all, until `max_tokens` are there; or open what is there.

    A file that is there was written by an earlier try at the same artifact.
    """
    if not path.exists():
        rows, tokens = iter(documents), 0
        with (atomic_path(path) as draft, pa.OSFile(str(draft), "wb") as sink,
              pa.ipc.new_stream(sink, SCHEMA) as stream):
            while (max_tokens is None or tokens < max_tokens) and (held := list(islice(rows, ROWS_AT_ONCE))):
                ids = [prompt + answer for prompt, answer in held]
                columns = [pa.array(ids, SCHEMA.types[0]), pa.array([len(prompt) for prompt, _ in held], pa.int32())]
                stream.write_batch(pa.record_batch(columns, schema=SCHEMA))
                tokens += sum(map(len, ids))
    return Documents(path)
