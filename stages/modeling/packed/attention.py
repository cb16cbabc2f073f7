"""Attention for batches without pads (ragged.py), for decoding, and for plain batches; on a CPU, at its products' rate.

Registered with Transformers as an attention implementation, so that every family takes it without a line of its own.
On a CPU fp32 and bf16 go through kernels of our own (native/), where they could be compiled; otherwise through
products, for torch's fused kernel is slower (6 times where fp32 goes through oneDNN, and in bf16), and left to GPUs.

Shapes: B rows, H heads, T columns, N tokens of all rows, W width of a head.
"""

from itertools import islice

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stages.modeling.cpu_kernels import attention as native
from stages.modeling.cpu_kernels.build import takes
from stages.modeling.packed.sequences import PackedBatch

NAME = "stackllama"
BLOCK_QUERIES = 192  # at a time: rows of 768 tokens take a quarter of the time, shorter blocks do not gain more
NO_MASK = torch.empty(1, 1, 1, 1)  # four dimensions: Transformers passes it on and builds none of its own


@torch.compiler.disable
def attend(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, batch=None, **more
):
    """Transformers' attention interface: query [B, H, T, W] (or [1, H, N, W] with a `batch`) to [B, T, H, W], None.

    batch: a Ragged batch, or a decoder's cache (key_values.KeyValues), that says which keys each query sees.
    """
    changes = [name for name in ("softcap", "position_bias", "s_aux") if more.get(name) is not None]
    if changes:
        raise ValueError(f"{module.config.model_type} caps or shifts its attention scores ({', '.join(changes)}): "
                         f"such families are not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if batch is None and query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if isinstance(batch, PackedBatch) and takes(query, key, value):
        return _NativeAttention.apply(query, key, value, batch, scaling, sliding_window), None
    groups = query.shape[1] // key.shape[1]
    if batch is not None and not isinstance(batch, PackedBatch):
        if batch.native:
            return native.newest(query[:, :, 0], key, value, batch.lengths, scaling, sliding_window)[:, None], None
        return _decode(query, key, value, batch.mask(sliding_window), scaling, groups), None
    if groups > 1:
        key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    if batch is None:
        return _plain(query, key, value, attention_mask, scaling, dropout), None
    return _ragged(query, key, value, batch, scaling, sliding_window), None


def _decode(query, key, value, mask, scaling: float, groups: int) -> torch.Tensor:
    """One new token a row, query [B, H, 1, W] over all keys so far; heads that share a key stand in for columns."""
    rows, heads, _, width = query.shape
    query = query.reshape(rows, heads // groups, groups, width)
    if query.device.type == "cpu":
        out = _plain(query, key, value, mask, scaling, 0.0)
    else:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)
    return out.transpose(1, 2).reshape(rows, 1, heads, width)


def _ragged(query, key, value, batch: PackedBatch, scaling: float, window: int | None) -> torch.Tensor:
    """[1, H, N, W] to [1, N, H, W]."""
    if query.device.type == "cpu":
        return _RaggedAttention.apply(query, key, value, batch, scaling, window)
    return _side_by_side(query, key, value, batch, scaling, window)


def _side_by_side(query, key, value, batch: PackedBatch, scaling: float, window: int | None) -> torch.Tensor:
    """As _RaggedAttention, by torch's fused kernel: a GPU's way."""
    (part,) = batch.parts
    wide = [part.wide(x[0].transpose(0, 1)).unflatten(0, (part.rows, -1)) for x in (query, key, value)]
    mask = None if window is None or window >= part.columns else _causal_bias(part.columns, window, wide[0])
    out = functional.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=mask is None, scale=scaling)
    found = out.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    part.put(found, out.flatten(0, 1))
    return found[None]


class _RaggedAttention(torch.autograd.Function):
    """Causal attention of rows laid end to end; forward and backward are three and five products, nothing is padded.

    One part of the batch, and of that one block of queries, at a time: its scores stay in the core's cache. A column
    beyond a row's end holds some other token: as a key it lies in every real query's future, as a query nobody reads
    it, and in the backward pass its gradient is 0.
    """

    @staticmethod
    def forward(ctx, query, key, value, batch: PackedBatch, scaling: float, window: int | None):
        dtype = _product_dtype(query)
        query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        out, kept = _like(value, batch), []
        bias = _causal_bias(batch.parts[-1].columns, window, query)
        with torch.autocast("cpu", enabled=False):
            for part in batch.parts:
                q, k, v = (part.wide(x) for x in (query, key, value))
                kept += (q, k, v)
                found = []
                for block in _blocks(part.columns):
                    seen = slice(0, block.stop)
                    scores = torch.baddbmm(bias[:, block, seen], q[:, block], k[:, seen].transpose(1, 2), alpha=scaling)
                    kept.append(scores.softmax(-1))
                    found.append(torch.bmm(kept[-1], v[:, seen]))
                part.put(out, torch.cat(found, 1) if len(found) > 1 else found[0])
        ctx.save_for_backward(*kept)
        ctx.batch, ctx.scaling = batch, scaling
        return out[None]

    @staticmethod
    def backward(ctx, gradient):
        kept = iter(ctx.saved_tensors)
        gradient = gradient[0]
        out = [torch.zeros_like(gradient) if ctx.batch.shares else _like(gradient, ctx.batch) for _ in range(3)]
        for part in ctx.batch.parts:
            query, key, value, *weights = islice(kept, 3 + len(_blocks(part.columns)))
            of_out = part.wide(gradient.to(query.dtype))
            of_out.view(part.rows, -1, *of_out.shape[1:]).mul_(part.inside)
            for found, whole in zip(_part_gradients(query, key, value, of_out, weights, ctx.scaling), out, strict=True):
                part.add(whole, found)
        return *(x.transpose(0, 1)[None] for x in out), None, None, None


class _NativeAttention(torch.autograd.Function):
    """The same by our own kernels, which make the shares anew in the backward pass."""

    @staticmethod
    def forward(ctx, query, key, value, batch: PackedBatch, scaling: float, window: int | None):
        dtype = _product_dtype(query)
        states = [native.in_one_piece(x[0].transpose(0, 1).to(dtype)) for x in (query, key, value)]
        out, sums = native.forward(*states, batch, scaling, window)
        ctx.save_for_backward(*states, sums)
        ctx.how, ctx.dtypes = (batch, scaling, window), [x.dtype for x in (query, key, value)]
        return out[None]

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        *states, sums = ctx.saved_tensors
        gradient = native.in_one_piece(gradient[0].to(states[0].dtype))
        found = native.backward(*states, gradient, sums, *ctx.how)
        slopes = [x.to(dtype).transpose(0, 1)[None] for x, dtype in zip(found, ctx.dtypes, strict=True)]
        return *slopes, None, None, None


def _like(values: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
    """To be written to, [N, H, W]; 0 in the filler."""
    found = values.new_empty(values.shape)
    found[batch.tokens :] = 0
    return found


def _part_gradients(query, key, value, of_out, weights: list[torch.Tensor], scaling: float) -> tuple[torch.Tensor, ...]:
    """Of query, key and value, all [H, T, W]; weights: of each block of queries."""
    found = []
    for block, shares in zip(_blocks(query.shape[1]), weights, strict=True):
        seen, of_block = slice(0, block.stop), of_out[:, block]
        scores = torch.bmm(of_block, value[:, seen].transpose(1, 2))
        scores = torch._softmax_backward_data(scores, shares, -1, scores.dtype)
        found.append((
            torch.bmm(scores, key[:, seen]).mul_(scaling),
            torch.bmm(scores.transpose(1, 2), query[:, block]).mul_(scaling),
            torch.bmm(shares.transpose(1, 2), of_block),
        ))
    if len(found) == 1:
        return found[0]
    of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for block, (q, k, v) in zip(_blocks(query.shape[1]), found, strict=True):
        of_query[:, block] = q
        of_key[:, : block.stop] += k
        of_value[:, : block.stop] += v
    return of_query, of_key, of_value


def _blocks(columns: int) -> list[slice]:
    """Queries of a part; none sees a key after its block, and those keys are left out."""
    return [slice(first, min(first + BLOCK_QUERIES, columns)) for first in range(0, columns, BLOCK_QUERIES)]


def _product_dtype(like: torch.Tensor) -> torch.dtype:
    kind = like.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else like.dtype


def _causal_bias(columns: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """[1, T, T]: 0 where a query (row) sees a key (column), -inf elsewhere."""
    bias = like.new_full((1, columns, columns), float("-inf"))
    hidden = bias.triu(1)
    return hidden if window is None else hidden + bias.tril(-window)


def _plain(query, key, value, mask, scaling: float, dropout: float) -> torch.Tensor:
    """Attention of rows side by side [B, H, T, W]; mask: True or 0 where a key is seen; none: causal."""
    scores = query @ key.transpose(2, 3) * scaling
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = functional.dropout(scores.float().softmax(-1).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, sdpa_mask)
