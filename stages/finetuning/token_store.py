"""Store token ids of documents on disk, in one Arrow file, and read them by index through a memory map.

Memory holds 8 bytes per document, whatever their lengths; `datasets.Dataset.from_file` can open the file too.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.files import atomic_path, check_free_space

BATCH_DOCUMENTS = 1000
SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("prompt_tokens", pa.int32())])


class TokenizedDocuments:
    """D documents in a file: `lengths` [D] in tokens, of which the first `prompt_tokens` [D] are the prompt."""

    def __init__(self, path: Path):
        table = pa.ipc.open_stream(pa.memory_map(str(path))).read_all()
        self._tokens = table["input_ids"]
        self.lengths = pc.list_value_length(self._tokens).to_numpy()
        self.prompt_tokens = table["prompt_tokens"].to_numpy()

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """Read the token ids of a document from `start` to `stop`."""
        return self._tokens[document].values.to_numpy()[start:stop]  # a view of the map


def write_documents(path: Path, documents: Iterable[tuple[list[int], list[int]]], max_tokens: int | None,
                    max_documents: int | None = None) -> TokenizedDocuments:
    """Write (prompt, answer) token ids to `path` atomically, until `max_tokens` are reached, and open the file.

    An existing file was written by an earlier attempt at the same artifact, and is opened as it is.

    Args:
        max_documents: how many documents there are at most. With it, ValueError if the disk has no room for as many of
            the size of the first ones, before any is written.
    """
    if not path.exists():
        tokens = 0
        with (atomic_path(path) as draft, pa.OSFile(str(draft), "wb") as file,
              pa.ipc.new_stream(file, SCHEMA) as stream):
            for batch in _encode_batches(documents):
                batch_tokens = len(batch["input_ids"].flatten())
                if not tokens and max_documents is not None:
                    batches = max_documents / len(batch)
                    if max_tokens is not None:
                        batches = min(batches, max_tokens / batch_tokens)
                    check_free_space("the token ids of the documents", path.parent, max(1, batches) * batch.nbytes)
                stream.write_batch(batch)
                tokens += batch_tokens
                if max_tokens is not None and tokens >= max_tokens:
                    break
    return TokenizedDocuments(path)


def _encode_batches(documents: Iterable[tuple[list[int], list[int]]]) -> Iterator[pa.RecordBatch]:
    remaining = iter(documents)
    while batch := list(islice(remaining, BATCH_DOCUMENTS)):
        columns = [pa.array([prompt + answer for prompt, answer in batch], SCHEMA.types[0]),
                   pa.array([len(prompt) for prompt, _ in batch], pa.int32())]
        yield pa.record_batch(columns, schema=SCHEMA)
