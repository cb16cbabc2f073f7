"""Log-probabilities of whole answers, in nats, under the policy and under its reference.

Shapes: A answers of all examples.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from stages.distributed import group
from stages.modeling.load import autocast
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import FORWARD_TOKENS, own_chunks, packed_hidden_states
from stages.modeling.packed.sequences import scatter_to_rows
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.modeling.packed.token_logprobs import logprobs_from_hidden
from stages.reward_modeling.dataset import Example, collate_examples
from stages.runtime.progress import Progress


@dataclass(frozen=True)
class ReferencedExample:
    """A question with answers and pairs, and each answer's log-probability under the reference."""

    example: Example
    ref_logprobs: tuple[float, ...]


def collate_rows(rows: list[ReferencedExample]) -> dict:
    """Return the rows as they are, and count their pairs and each one's tokens."""
    return collate_examples([row.example for row in rows]) | {"content": rows}


def answer_logprobs(model, examples: Sequence[Example]) -> torch.Tensor:
    """Sum the log-probabilities of each answer's tokens [A], fp32. Answers share the pass of their question."""
    model = unwrap_peft(model)
    packed = pack_with_shared_prefix(
        [example.prompt for example in examples], [example.answers for example in examples], model.device)
    hidden = packed_hidden_states(model, packed.batch, packed.predictor_positions)
    return scatter_to_rows(logprobs_from_hidden(model, hidden, packed.token_ids), packed).sum(-1)


@torch.no_grad()
def all_answer_logprobs(
    model, examples: Sequence[Example], precision: str, progress: Progress | None = None
) -> torch.Tensor:
    """Compute `answer_logprobs` [A] of any number of examples, on the CPU.

    The examples are shared among the processes. progress: of the examples of this process.
    """
    assert not model.training, "dropout would act on the log-probabilities"
    if not examples:
        return torch.zeros(0)
    lengths = collate_examples(list(examples))["lengths"]
    parts = [slice(*span) for span in pairwise([0, *accumulate(len(example.answers) for example in examples)])]
    logprobs = torch.zeros(parts[-1].stop)
    for chunk in own_chunks(lengths, max_tokens=FORWARD_TOKENS):
        with autocast(precision):
            flat = answer_logprobs(model, [examples[i] for i in chunk]).cpu()
        for i, row in zip(chunk, flat.split([len(examples[i].answers) for i in chunk]), strict=True):
            logprobs[parts[i]] = row
        if progress:
            progress.advance(len(chunk))
    return group.sum_tensor(logprobs)
