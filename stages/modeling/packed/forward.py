"""TODO docstring."""

from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedModel

from stages.modeling.families import backbone
from stages.modeling.packed import attention, last_layer
from stages.modeling.packed.sequences import PackedBatch


def pad_batch(
    rows: list[list[int]], side: str = "right", where: torch.device | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ragged token ids to (input_ids, keep_mask), both [rows, longest] int64; filler is id 0 and masked."""
    longest = max(map(len, rows))
    input_ids = torch.zeros(len(rows), longest, dtype=torch.long)
    keep_mask = torch.zeros_like(input_ids)
    for index, row in enumerate(rows):
        place = slice(0, len(row)) if side == "right" else slice(longest - len(row), longest)
        input_ids[index, place] = torch.tensor(row)
        keep_mask[index, place] = 1
    return input_ids.to(where), keep_mask.to(where)


def chunks_by_length(lengths: Sequence[int], size: int) -> Iterator[list[int]]:
    """Indices in groups of at most `size`, like lengths together: fewer pads. The order depends on the lengths only."""
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    for start in range(0, len(order), size):
        yield order[start : start + size]


def position_ids(keep_mask: torch.Tensor) -> torch.Tensor:
    """Position ids [rows, length]: a real token's position counts the real tokens before it, whatever the padding."""
    return (keep_mask.cumsum(-1) - 1).clamp(min=0)


def last_hidden_states(model: PreTrainedModel, input_ids: torch.Tensor, keep_mask: torch.Tensor) -> torch.Tensor:
    """What the trunk under a model's head computes, [rows, length, width], for rows padded on either side."""
    states = backbone(model)(input_ids=input_ids, attention_mask=keep_mask, position_ids=position_ids(keep_mask))
    return states.last_hidden_state


def packed_hidden_states(model: PreTrainedModel, batch: PackedBatch, wanted: torch.Tensor, **cache) -> torch.Tensor:
    """As `last_hidden_states`, for rows laid end to end, at the tokens `wanted` [M]: [M, width].

    cache: as Transformers takes it.
    """
    inner = use_packed_attention(model)
    with last_layer.only_at(inner, wanted, batch.input_ids.shape[1]):
        states = inner(
            input_ids=batch.input_ids, position_ids=batch.positions, attention_mask=attention.NO_MASK, batch=batch,
            **({"use_cache": False} | cache),
        ).last_hidden_state[0]
    return states.index_select(0, wanted)


def use_packed_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The trunk, sure to attend as attention.py does: another implementation would pass over the rows' ends."""
    inner = backbone(model)
    if inner.config._attn_implementation != attention.NAME:
        inner.set_attn_implementation(attention.NAME)
    return inner
