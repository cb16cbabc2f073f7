"""The language-modelling loss on packed documents: rows end to end, no pads, logits only where there is a label."""

from collections.abc import Iterable

import numpy as np
import torch

from stages.finetuning.packing import Row
from stages.modeling import lora
from stages.modeling.load import autocast
from stages.modeling.packed import forward
from stages.modeling.packed.sequences import pack
from stages.modeling.packed.token_logprobs import selective_log_softmax


def collate_blocks(blocks: Iterable[list[Row]]) -> dict:
    """Blocks to their rows, and the number of labels in them."""
    rows = [row for block in blocks for row in block]
    return {"content": rows, "items": sum(int(row.learnt.sum()) for row in rows)}


def summed_loss(model, rows: list[Row], precision: str) -> torch.Tensor:
    """Minus the log-probability of every labelled token, summed; nats, fp32."""
    model = lora.unwrap_peft(model)
    batch = pack([row.ids.tolist() for row in rows], model.device)
    places = [np.flatnonzero(row.learnt) for row in rows]
    starts = torch.repeat_interleave(batch.starts, torch.tensor([*map(len, places)], device=model.device))
    labelled = starts + torch.from_numpy(np.concatenate(places)).to(model.device)
    with autocast(precision):
        hidden = forward.packed_hidden_states(model, batch, labelled - 1)
        logprobs = selective_log_softmax(
            model.get_output_embeddings(), hidden, batch.input_ids[0, labelled], 1.0,
            cpu_kernels=forward.uses_cpu_kernels(model),
        )
        return -logprobs.sum()
