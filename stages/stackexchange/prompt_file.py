"""Read a user's own prompts: JSON lines, Parquet, plain text, or a folder that the library datasets saved.

Some of them are held out from training: every program that reads a file holds out the same ones.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

COLUMNS = ("prompt", "question", "text")  # the first that there is
JSON_LINES, TEXT, PARQUET = (".jsonl", ".ndjson"), (".txt", ".text"), (".parquet",)
FORMATS = (f"prompts are read from {', '.join((*JSON_LINES, *PARQUET, *TEXT))} (one prompt a line), and from a folder "
           f"that datasets.save_to_disk made or that has such files")
SAVED_BY_DATASETS = ("dataset_dict.json", "state.json")
MAX_HELD_OUT_SHARE = 0.25  # of the prompts
MIN_TRAINING_PROMPTS = 4  # that are not held out


def read_own_prompts(path: Path, column: str | None) -> list[str]:
    """Read the prompts of a file or folder, each once, in their order; blank ones are left out.

    column: that has their text; None: the first of COLUMNS. Raises ValueError with the place of what cannot be read.
    """
    texts = dict.fromkeys(chain.from_iterable(_read_file(file, column) for file in _list_files(path)))
    prompts = [text for text in texts if text.strip()]
    if not prompts:
        raise ValueError(f"{path} has no prompts")
    return prompts


def hold_out_prompts(prompts: Sequence[str], most: int, seed: int) -> tuple[list[str], list[str]]:
    """Split prompts into those to train on, and at most `most` held out for the evaluation; both in their order.

    At most a quarter is held out, and MIN_TRAINING_PROMPTS are left. Which ones depends on the texts and the seed
    alone, not on their order. Texts that differ only in white space are one prompt: both sides cannot have it.
    """
    distinct = sorted({_join_words(text) for text in prompts}, key=lambda text: _seeded_hash(text, seed))
    count = min(most, int(MAX_HELD_OUT_SHARE * len(distinct)), max(0, len(distinct) - MIN_TRAINING_PROMPTS))
    evaluation = set(distinct[:count])
    return ([text for text in prompts if _join_words(text) not in evaluation],
            [text for text in prompts if _join_words(text) in evaluation])


def _join_words(text: str) -> str:
    return " ".join(text.split())


def _seeded_hash(text: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}\n{text}".encode("utf-8", "surrogatepass")).digest()


def _list_files(path: Path) -> list[Path]:
    """List the files of a folder that have prompts, or the file itself; a folder of datasets stands for itself."""
    if not path.is_dir() or any((path / name).is_file() for name in SAVED_BY_DATASETS):
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (*JSON_LINES, *TEXT, *PARQUET))
    if not files:
        raise ValueError(f"{path} has no file of prompts: {FORMATS}")
    return files


def _read_file(path: Path, column: str | None) -> Iterator[str]:
    suffix = path.suffix.lower()
    if path.is_dir():
        return _take_column(_load_saved(path), column, path)
    if suffix in PARQUET:
        return _take_column(_read_parquet(path), column, path)
    if suffix in JSON_LINES:
        return _read_json_lines(path, column)
    if suffix not in TEXT:
        raise ValueError(f"{path}: {FORMATS}")
    if column is not None:
        raise ValueError(f"{path} is plain text and has no column {column!r}: leave prompt_column out")
    return iter(_read_lines(path))


def _read_lines(path: Path) -> list[str]:
    try:
        return [line.rstrip("\r") for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text (UTF-8): {error.reason} at byte {error.start}") from None


def _read_json_lines(path: Path, column: str | None) -> Iterator[str]:
    for number, line in enumerate(_read_lines(path), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError):
            raise ValueError(f"{where}: is no JSON") from None
        if not isinstance(row, dict):
            raise ValueError(f'{where}: must be an object with the prompt, as {{"prompt": "..."}}')
        yield _check_text(row[_choose_column(row, column, where)], where)


def _read_parquet(path: Path) -> pa.Table:
    try:
        return pq.read_table(path)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise ValueError(f"{path} cannot be read as Parquet: {str(error).splitlines()[0]}") from None


def _load_saved(path: Path) -> pa.Table:
    """Load a data set that datasets saved; of one with splits, 'train' or the only one."""
    from datasets import DatasetDict, load_from_disk  # takes a second
    try:
        data = load_from_disk(str(path))
    except Exception as error:  # of a folder from elsewhere anything may be wrong
        raise ValueError(f"{path} cannot be read as a folder of datasets: {' '.join(str(error).split())[:200]}"
                         ) from error
    if isinstance(data, DatasetDict):
        name = next(iter(data)) if len(data) == 1 else "train"
        if name not in data:
            raise ValueError(f"{path} has the splits {', '.join(data) or 'none'}, and no 'train': give the folder of "
                             f"one of them")
        data = data[name]
    return data.with_format("arrow")[:]


def _take_column(table: pa.Table, column: str | None, path: Path) -> Iterator[str]:
    name = _choose_column(table.column_names, column, str(path))
    for number, value in enumerate(table[name].to_pylist(), 1):
        yield _check_text(value, f"{path}, row {number}")


def _choose_column(names, column: str | None, where: str) -> str:
    """Return the column of the prompts; ValueError with those that there are."""
    wanted = COLUMNS if column is None else (column,)
    name = next((name for name in wanted if name in names), None)
    if name is None:
        raise ValueError(f"{where}: there is no column {' or '.join(wanted)}; there are: {', '.join(names) or 'none'} "
                         f"(set prompt_column to the one with the prompts)")
    return name


def _check_text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: the prompt must be text, not {type(value).__name__} (of messages, make a text with "
                         f"the chat template first, and set prompt_template to 'none')")
    return value
