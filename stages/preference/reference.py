"""Compute the reference's log-probabilities once, before training, and store them with the artifact.

The reference is the policy before training: the model without its adapter, or the whole model whose weights have not
moved yet. An interrupted run goes on after the last examples that were stored.
"""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stages.distributed import group
from stages.modeling.adapters import active_adapter
from stages.preference.logprobs import ReferencedExample, all_answer_logprobs
from stages.reward_modeling.dataset import Example
from stages.runtime.files import atomic_path
from stages.runtime.progress import Progress

STORE_EVERY_EXAMPLES = 1024
# One row an answer, in the order of training.
SCHEMA = pa.schema([("site", pa.string()), ("qid", pa.int64()), ("tokens", pa.int64()), ("logprob", pa.float32())])


def compute_reference(
    model, examples: Sequence[Example], precision: str, file: Path, label: str
) -> list[ReferencedExample]:
    """Return the examples with their reference log-probabilities, which are stored in `file`.

    Args:
        model: not trained yet, in eval mode.
        file: a Parquet table with SCHEMA; what it holds is not computed again.
        label: name of the progress line.
    """
    counts = [len(example.answers) for example in examples]
    stored = _read(file)
    done = _count_stored(counts, len(stored))
    count = group.world_size()  # progress is that of this process
    progress = Progress(label, len(examples) // count, "examples", done=done // count)
    for first in range(done, len(examples), STORE_EVERY_EXAMPLES):
        part = examples[first: first + STORE_EVERY_EXAMPLES]
        with active_adapter(model, None):
            stored += all_answer_logprobs(model, part, precision, progress).tolist()
        _write(file, examples[: first + len(part)], stored)
    progress.finish()
    parts = torch.tensor(stored).split(counts) if counts else ()
    return [ReferencedExample(example, tuple(part.tolist())) for example, part in zip(examples, parts, strict=True)]


def _count_stored(counts: list[int], answers: int) -> int:
    """Return the number of examples whose answers, `counts` of each, are the first `answers` ones."""
    done = 0
    while answers > 0:
        answers -= counts[done]
        done += 1
    return done


def _read(file: Path) -> list[float]:
    return pq.read_table(file, columns=["logprob"])["logprob"].to_pylist() if file.exists() else []


def _write(file: Path, examples: Sequence[Example], logprobs: list[float]) -> None:
    rows = [(*example.question, len(answer)) for example in examples for answer in example.answers]
    site, qid, tokens = zip(*rows, strict=True)
    with atomic_path(file, sync=True) as draft:
        pq.write_table(pa.table([site, qid, tokens, logprobs], schema=SCHEMA), draft, compression="zstd")
