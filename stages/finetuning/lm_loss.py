"""Compute the language-modelling loss of packed documents, padding-free, with logits at labelled tokens only."""

from collections.abc import Iterable

import numpy as np
import torch

from stages.finetuning.packing import PackedRow
from stages.modeling import lora
from stages.modeling.load import autocast
from stages.modeling.output_layer import output_layer
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.token_logprobs import selective_log_softmax


def collate_blocks(blocks: Iterable[list[PackedRow]]) -> dict:
    """Join the rows of all blocks, and count their labels."""
    rows = [row for block in blocks for row in block]
    return {"content": rows, "items": sum(int(row.is_label.sum()) for row in rows)}


def summed_lm_loss(model, rows: list[PackedRow], precision: str) -> torch.Tensor:
    """Sum the negative log-probabilities of all labelled tokens, in nats, as fp32."""
    model = lora.unwrap_peft(model)
    batch = pack([row.token_ids.tolist() for row in rows], model.device)
    columns = [np.flatnonzero(row.is_label) for row in rows]
    starts = torch.repeat_interleave(batch.starts, torch.tensor([*map(len, columns)], device=model.device))
    labels = starts + torch.from_numpy(np.concatenate(columns)).to(model.device)
    with autocast(precision):
        hidden = forward.packed_hidden_states(model, batch, labels - 1)
        logprobs = selective_log_softmax(
            output_layer(model), hidden, batch.input_ids[0, labels], 1.0,
            cpu_kernels=forward.uses_cpu_kernels(model),
        )
        return -logprobs.sum()
