"""Attention for packed batches by torch's varlen kernel (FlashAttention), on a GPU in bf16 or fp16: nothing is padded.

`index_rows` turns the rows of a batch into what torch.nn.attention.varlen.varlen_attn takes: the tokens of all rows,
one row after the other, and the offsets at which rows begin. A row may have fewer queries than keys, where its first
tokens are computed in another row (shared_prefix.py). Its queries are then its last tokens, as the kernel's causal mask
assumes, which is aligned at the ends of both.

Shapes: B rows, H heads, N tokens of the batch, W width of a head.
"""

from typing import NamedTuple

import torch
from torch.nn.attention.varlen import varlen_attn

LARGEST_WIDTH, WIDTH_STEP = 256, 8  # of a head, in FlashAttention
FIRST_CAPABILITY = (8, 0)  # Ampere


class VarlenIndex(NamedTuple):
    """Queries and keys of all rows as positions in the batch, and where the rows begin among them.

    query_positions, key_positions: int64, or a slice where the rows are in the batch's order, which copies nothing;
    each token of a row is a query once, in whichever row it is computed. query_starts, key_starts [B + 1]: int32, from
    0 to the number of positions. longest_query, longest_key: of a row.
    """

    query_positions: torch.Tensor | slice
    key_positions: torch.Tensor | slice
    query_starts: torch.Tensor
    key_starts: torch.Tensor
    longest_query: int
    longest_key: int


def index_rows(
    tokens: torch.Tensor, starts: torch.Tensor, first_queries: torch.Tensor, device: torch.device
) -> VarlenIndex:
    """Build the index on the CPU from the fields of a batch's RowIndex (sequences.py), and move it to the device."""
    lengths = starts.diff()
    column = torch.arange(len(tokens)) - torch.repeat_interleave(starts[:-1], lengths)
    is_query = column >= torch.repeat_interleave(first_queries, lengths)
    query_lengths = lengths - first_queries
    in_order = torch.equal(tokens, torch.arange(len(tokens)))
    return VarlenIndex(
        query_positions=slice(len(tokens)) if in_order and is_query.all() else tokens[is_query].to(device),
        key_positions=slice(len(tokens)) if in_order else tokens.to(device),
        query_starts=_offsets(query_lengths).to(device),
        key_starts=_offsets(lengths).to(device),
        longest_query=int(query_lengths.max()),
        longest_key=int(lengths.max()),
    )


def supports(query: torch.Tensor, dtype: torch.dtype) -> bool:
    """Check whether the kernel can compute with queries like these in `dtype`."""
    return (query.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16)
            and query.shape[-1] % WIDTH_STEP == 0 and query.shape[-1] <= LARGEST_WIDTH
            and torch.cuda.get_device_capability(query.device) >= FIRST_CAPABILITY)


def attend_varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, index: VarlenIndex, scaling: float,
    window: int | None, dtype: torch.dtype
) -> torch.Tensor:
    """Attend causally within each row, [1, H, N, W] to [1, N, H, W] in `dtype`; 0 where no row has a query.

    Keys and values may have fewer heads. window: how many tokens a query sees, itself included; None: all.
    """
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    out = varlen_attn(
        query[index.query_positions], key[index.key_positions], value[index.key_positions],
        index.query_starts, index.key_starts, index.longest_query, index.longest_key,
        scale=scaling, window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1])
    packed = out.new_zeros(query.shape)
    packed[index.query_positions] = out
    return packed[None]


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return where each of some consecutive rows begins, and where the last one ends, [B + 1] int32."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
