"""Attention for batches without pads (ragged.py), for decoding, and for plain batches; on a CPU, at its products' rate.

Registered with Transformers as an attention implementation, so that every family takes it without a line of its own.
On a CPU the fused kernel of torch is slower than three products (6 times where fp32 goes through oneDNN, and in bf16),
so it is left to GPUs. Shapes: B rows, H heads, T columns, N tokens of all rows, W width of a head.
"""

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stages.learning.ragged import Ragged

NAME = "stackllama"
NO_MASK = torch.empty(1, 1, 1, 1)  # four dimensions: Transformers passes it on and builds none of its own


def attend(module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, batch=None, **more):
    """Transformers' attention interface: query [B, H, T, W] (or [1, H, N, W] with a `batch`) to [B, T, H, W], None.

    batch: a Ragged batch, or a decoder's cache (rollout.KeyValues), that says which keys each query sees.
    """
    changes = [name for name in ("softcap", "position_bias", "s_aux") if more.get(name) is not None]
    if changes:
        raise ValueError(f"{module.config.model_type} caps or shifts its attention scores ({', '.join(changes)}): "
                         f"such families are not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if batch is None and query.device.type != "cpu":
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    groups = query.shape[1] // key.shape[1]
    if batch is not None and not isinstance(batch, Ragged):
        return _decode(query, key, value, batch.mask(sliding_window), scaling, groups), None
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
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


def _ragged(query, key, value, batch: Ragged, scaling: float, window: int | None) -> torch.Tensor:
    bias = _causal_bias(batch.columns, window, query)
    if query.device.type == "cpu":
        out = _RaggedAttention.apply(query, key, value, batch, bias, scaling)
    else:
        wide = [_wide(x[0], batch).view(1, x.shape[1] * batch.rows, batch.columns, -1) for x in (query, key, value)]
        mask = bias if window is not None and window < batch.columns else None
        out = functional.scaled_dot_product_attention(*wide, attn_mask=mask, is_causal=mask is None, scale=scaling)
        out = _narrow(out[0], batch)
    return out.transpose(0, 1)[None]


class _RaggedAttention(torch.autograd.Function):
    """Causal attention of rows laid end to end; forward and backward are three and five products, nothing is padded.

    A column beyond a row's end repeats token 0: as a key it lies in every real query's future, as a query nobody reads
    it, and in the backward pass its gradient is 0.
    """

    @staticmethod
    def forward(ctx, query, key, value, batch: Ragged, bias, scaling: float):
        with torch.autocast(bias.device.type, enabled=False):
            query, key, value = (_wide(x[0].to(bias.dtype), batch) for x in (query, key, value))
            weights = torch.baddbmm(bias, query, key.transpose(1, 2), alpha=scaling).softmax(-1)
            ctx.save_for_backward(query, key, value, weights)
            ctx.batch, ctx.scaling = batch, scaling
            return _narrow(torch.bmm(weights, value), batch)

    @staticmethod
    def backward(ctx, gradient):
        query, key, value, weights = ctx.saved_tensors
        out = _wide(gradient.to(weights.dtype), ctx.batch, zero_beyond=True)
        scores = torch.bmm(out, value.transpose(1, 2))
        scores = torch._softmax_backward_data(scores, weights, -1, scores.dtype)
        of_query = torch.bmm(scores, key).mul_(ctx.scaling)
        of_key = torch.bmm(scores.transpose(1, 2), query).mul_(ctx.scaling)
        of_value = torch.bmm(weights.transpose(1, 2), out)
        return *(_narrow(x, ctx.batch)[None] for x in (of_query, of_key, of_value)), None, None, None


def _wide(values: torch.Tensor, batch: Ragged, zero_beyond: bool = False) -> torch.Tensor:
    """[H, N, W] to [H * B, T, W]."""
    found = values.index_select(1, batch.gather)
    if zero_beyond:
        found.index_fill_(1, batch.beyond, 0)
    return found.view(-1, batch.columns, values.shape[-1])


def _narrow(values: torch.Tensor, batch: Ragged) -> torch.Tensor:
    """[H * B, T, W] to [H, N, W], 0 in the filler."""
    found = values.reshape(-1, batch.rows * batch.columns, values.shape[-1]).index_select(1, batch.place)
    found[:, batch.tokens :] = 0
    return found


def _causal_bias(columns: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """[1, T, T]: 0 where a query (row) sees a key (column), -inf elsewhere."""
    if torch.is_autocast_enabled(like.device.type):
        dtype = torch.get_autocast_dtype(like.device.type)
    else:
        dtype = like.dtype
    bias = torch.full((1, columns, columns), float("-inf"), dtype=dtype, device=like.device)
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
