"""Sorted runs: Arrow files sorted by a uint64 column `key`, with one record batch per part (a range of keys).

The key of a question is a hash of seed, site and question id. The first N questions are therefore a random sample, a
part is a range of hashes whatever the number of parts, and all parts are about equal in size.

Each scan task writes its own runs. A part is read back as one batch of every run, so memory holds one part, whatever
the total.
"""

import hashlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from stages.runtime.files import atomic_path

KEY_COUNT = 1 << 64
MIXERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))

KEY = pa.field("key", pa.uint64())
POST_ORDER = ["key", "source", "question_id", "kind", "id", "offset"]
ID_ORDER = ["key", "source", "id", "offset"]
VOTE_ORDER = ["key", "source", "id"]
RECORD_ORDER = ["key", "source", "number"]
KINDS = ("posts", "sizes", "ids", "votes", "records", "record_sizes")


def list_run_files(folder: Path) -> dict[str, list[Path]]:
    """List the runs of each kind in a folder."""
    return {kind: sorted(folder.glob(f"{kind}-*.arrow")) for kind in KINDS}


def add_key_column(table: pa.Table, keys: np.ndarray) -> pa.Table:
    """Return `table` with `key` as its first column."""
    return table.add_column(0, KEY, pa.array(keys))


def write_run(path: Path, table: pa.Table, order: list[str], parts: int) -> None:
    """Sort `table` by the columns `order` (`key` first) and write it atomically, split into `parts` batches."""
    table = sort_table(table, order)
    first_keys = np.array([first_key(part, parts) for part in range(parts)], dtype=np.uint64)
    bounds = [*np.searchsorted(table["key"].to_numpy(), first_keys).tolist(), len(table)]
    with atomic_path(path) as draft, pa.ipc.new_file(str(draft), table.schema) as writer:
        for start, stop in pairwise(bounds):
            writer.write_batch(_combine(table.slice(start, stop - start)))


def write_run_with_sizes(path: Path, sizes_path: Path, table: pa.Table, order: list[str], parts: int) -> None:
    """Write a run, and beside it `size` in bytes and number of `posts` of each row's key."""
    write_run(sizes_path, table.select(["key", "size", "posts"]), ["key"], parts)
    write_run(path, table.drop_columns("posts"), order, parts)


def sort_table(table: pa.Table, order: list[str]) -> pa.Table:
    """Sort by these columns, ascending."""
    return table.take(pc.sort_indices(table, sort_keys=[(name, "ascending") for name in order]))


def _combine(table: pa.Table) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([column.combine_chunks() for column in table.columns], schema=table.schema)


def read_part(runs: list[Path], part: int, keys: np.ndarray | None = None) -> pa.Table:
    """Concatenate one part of all runs (at least one), unsorted; only the rows with these keys, if given sorted keys.
    """
    return pa.concat_tables(_read_batch(run, part, keys) for run in runs)


def _read_batch(run: Path, part: int, keys: np.ndarray | None) -> pa.Table:
    # Read, not memory-mapped: a mapping counts as memory far beyond the bytes that are used. Opened each time: a big
    # dump has more runs than a process may have open files.
    with pa.OSFile(str(run)) as stream:
        batch = pa.ipc.open_file(stream).get_batch(part)
    if keys is not None:
        batch_keys = batch["key"].to_numpy()
        nearest = keys[np.searchsorted(keys[:-1], batch_keys)]  # of all but the last key: an index for every row
        batch = batch.filter(pa.array(nearest == batch_keys))
    return pa.Table.from_batches([batch])


def hash_ids(site: str, purpose: str, ids: np.ndarray) -> np.ndarray:
    """Hash int64 ids to uint64 keys; a bijection for each site and purpose, so two ids never share a key.

    The finaliser of splitmix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators").
    """
    salt = int.from_bytes(hashlib.blake2b(f"{purpose}\n{site}".encode(), digest_size=8).digest(), "big")
    mixed = ids.astype(np.uint64) + np.uint64(salt)  # modulo 2^64
    for shift, factor in MIXERS:
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


def question_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute the keys of one site's questions: their order in the artifact."""
    return hash_ids(site, f"{seed} question", ids)


def question_keys_by_site(sites: Sequence[str], seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute `question_keys` of ids whose sites differ; `sites` and `ids` have equal lengths."""
    names, keys = np.asarray(sites, dtype=object), np.empty(len(ids), dtype=np.uint64)
    for site in set(sites):
        rows = names == site
        keys[rows] = question_keys(site, seed, ids[rows])
    return keys


def post_keys(site: str, seed: int, ids: np.ndarray) -> np.ndarray:
    """Compute the keys of one site's posts, which bring equal ids and their votes into the same part."""
    return hash_ids(site, f"{seed} post", ids)


def first_key(part: int, parts: int) -> int:
    """Return the first key of a part; parts are key ranges of equal length."""
    return KEY_COUNT * part // parts
