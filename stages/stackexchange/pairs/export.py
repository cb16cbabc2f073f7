"""Export pairs as `prompt, chosen, rejected`: what TRL calls a preference data set with an explicit prompt.

The prompt is the very text that every stage trains on (stages/stackexchange/prompt.py). An answer has no EOS: TRL adds
it.
"""

import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from stages.runtime.files import atomic_path
from stages.stackexchange.pairs.table import GROUP_PAIRS, read_pairs
from stages.stackexchange.prompt import prompt_text

SCHEMA = pa.schema([("prompt", pa.string()), ("chosen", pa.string()), ("rejected", pa.string())])
COLUMNS = ["question", "response_j", "response_k"]


def export_preferences(pairs: Path, split: str, out: Path) -> int:
    """Write one split to a new .parquet or .jsonl file; return the number of pairs. ValueError for another name."""
    writers = {".parquet": _write_parquet, ".jsonl": _write_jsonl}
    if out.suffix not in writers:
        raise ValueError(f"--out {out}: give a name that ends in .parquet or .jsonl")
    if out.exists():
        raise ValueError(f"--out {out} exists already: give another name, or delete it")
    if not out.parent.is_dir():
        raise ValueError(f"--out {out}: there is no folder {out.parent}")
    rows = ({"prompt": prompt_text(row["question"]), "chosen": row["response_j"], "rejected": row["response_k"]}
            for row in read_pairs(pairs, split, COLUMNS))
    with atomic_path(out) as draft:
        return writers[out.suffix](rows, draft)


def _write_parquet(rows: Iterable[dict], path: Path) -> int:
    count = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        for group in _split_groups(rows):
            writer.write_table(pa.Table.from_pylist(group, schema=SCHEMA))
            count += len(group)
    return count


def _write_jsonl(rows: Iterable[dict], path: Path) -> int:
    count = 0
    with open(path, "w", encoding="utf-8") as stream:
        for group in _split_groups(rows):
            stream.writelines(json.dumps(row) + "\n" for row in group)
            count += len(group)
    return count


def _split_groups(rows: Iterable[dict]) -> Iterator[list[dict]]:
    rows = iter(rows)
    while group := list(islice(rows, GROUP_PAIRS)):
        yield group
