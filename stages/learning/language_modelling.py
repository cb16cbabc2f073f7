"""Packed causal language modelling: documents of token ids to blocks, and a model trained on them.

Packing is TRL's: 'wrapped' concatenates and cuts (ConstantLengthDataset of StackLLaMA; attention crosses documents),
'bfd' fills blocks with whole documents, resets positions at each, and lets none attend to another.
"""

from collections.abc import Iterable

import torch
from datasets import Dataset
from torch.nn import functional
from trl.data_utils import pack_dataset

from stages.learning.models import positions

IGNORED = -100  # label of a position without loss


def packed(documents: Iterable[list[int]], block_tokens: int, strategy: str) -> Dataset:
    """Blocks of at most `block_tokens`: `input_ids`, and `seq_lengths` of the documents in each ('bfd').

    'wrapped' keeps every token; a last short block stays short. 'bfd' cuts a document longer than a block into pieces.
    """
    rows = list(documents)
    if strategy == "bfd":  # TRL would drop what does not fit into a block
        rows = [
            document[start : start + block_tokens]
            for document in rows
            for start in range(0, len(document), block_tokens)
        ]
    return pack_dataset(Dataset.from_dict({"input_ids": rows}), block_tokens, strategy=strategy)


def collate_blocks(items: list[dict]) -> dict:
    """Blocks to a batch [blocks, longest]: labels from lengths, never from ids, so that EOS keeps its label.

    With documents marked, positions restart at each, which is also how Transformers derives the block-diagonal mask;
    the first token of a document has no label: nothing before it may predict it.
    """
    longest = max(len(item["input_ids"]) for item in items)
    shape = (len(items), longest)
    input_ids = torch.zeros(shape, dtype=torch.long)
    labels = torch.full(shape, IGNORED)
    position_ids = torch.zeros(shape, dtype=torch.long)
    for row, item in enumerate(items):
        ids = torch.tensor(item["input_ids"])
        lengths = item.get("seq_lengths") or [len(ids)]
        starts = torch.tensor([0, *lengths]).cumsum(0)[:-1]
        input_ids[row, : len(ids)] = labels[row, : len(ids)] = ids
        labels[row, starts] = IGNORED
        position_ids[row, : len(ids)] = torch.cat([torch.arange(n) for n in lengths])
    # With a cache Transformers would not look at the positions, and documents would attend to each other.
    return {"input_ids": input_ids, "labels": labels, "position_ids": position_ids, "use_cache": False}


@torch.no_grad()
def answer_log_probabilities(
    model, input_ids: torch.Tensor, keep_mask: torch.Tensor, prompt_lengths: list[int]
) -> list[torch.Tensor]:
    """Log-probability of each answer token, a 1-D fp32 tensor a row (right-padded rows [rows, length])."""
    logits = model(input_ids=input_ids, attention_mask=keep_mask, position_ids=positions(keep_mask)).logits
    found = []
    for row, start in enumerate(prompt_lengths):
        end = int(keep_mask[row].sum())
        scores = functional.log_softmax(logits[row, start - 1 : end - 1].float(), dim=-1)
        found.append(scores.gather(-1, input_ids[row, start:end, None]).squeeze(-1))
    return found
