"""Compute the reference's log-probabilities once, before training, and store them with the artifact; check that the
untrained policy is the same model.

The reference is the policy before training: the model without its adapter, or the whole model whose weights have not
moved yet. An interrupted run goes on after the last examples that were stored.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from stages.distributed import group
from stages.modeling.adapters import active_adapter
from stages.modeling.load import autocast
from stages.modeling.packed.token_logprobs import response_logprobs
from stages.preference.logprobs import ReferencedExample, all_answer_logprobs
from stages.preference.loss import PreferenceLoss
from stages.reward_modeling.dataset import Example
from stages.runtime.files import atomic_path
from stages.runtime.progress import Progress

STORE_EVERY_EXAMPLES = 1024
# One row an answer, in the order of training.
SCHEMA = pa.schema([("site", pa.string()), ("qid", pa.int64()), ("tokens", pa.int64()), ("logprob", pa.float32())])
PROBE_EXAMPLES = 8
# Largest difference, mean nats a token of an answer. Rounding gives 1e-6 in fp32 and 1e-2 in bf16; another model 0.1
# and more.
LIMITS = {"fp32": 1e-3} | dict.fromkeys(("mixed", "bf16", "int8", "nf4"), 0.1)


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
    stored = pq.read_table(file, columns=["logprob"])["logprob"].to_pylist() if file.exists() else []
    done = [*accumulate(counts, initial=0)].index(len(stored))
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


def _write(file: Path, examples: Sequence[Example], logprobs: list[float]) -> None:
    rows = [(*example.question, len(answer)) for example in examples for answer in example.answers]
    site, qid, tokens = zip(*rows, strict=True)
    with atomic_path(file, sync=True) as draft:
        pq.write_table(pa.table([site, qid, tokens, logprobs], schema=SCHEMA), draft, compression="zstd")


@torch.no_grad()
def check_start(model, rows: list[ReferencedExample], loss: PreferenceLoss, precision: str
                ) -> dict[str, float]:
    """Compare the policy with the reference on the first rows; ValueError if they differ by more than rounding.

    The policy is computed with one sequence an answer (`response_logprobs`), unlike the reference, whose answers share
    their question's tokens.

    Returns the content of startup.json; `expected_loss` is the loss where both agree to the last bit.
    """
    rows = rows[:PROBE_EXAMPLES]
    texts = [(row.example.prompt, answer) for row in rows for answer in row.example.answers]
    with autocast(precision):
        tokens = response_logprobs(model, *map(list, zip(*texts, strict=True)), 1.0)
    logprobs = torch.stack([row.sum() for row in tokens])
    equal = torch.tensor([ref for row in rows for ref in row.ref_logprobs])
    ratios = logprobs - equal
    difference = max(float((ratio / len(row)).abs()) for ratio, row in zip(ratios, tokens, strict=True))
    if not difference <= LIMITS[precision]:
        raise ValueError(f"the policy differs from its reference before the first step, by {difference:.2g} nats a "
                         f"token (limit {LIMITS[precision]:g}): delete the unfinished artifact's folder and begin anew")
    return {"examples": len(rows), "largest_difference_nats_per_token": difference,
            "largest_implicit_reward": loss.beta * float(ratios.abs().max()),
            "loss": float(loss.losses(logprobs, rows).mean()), "expected_loss": float(loss.losses(equal, rows).mean())}
