"""Attention for packed batches (sequences.py), for decoding with a packed cache, and for padded batches.

Registered with Transformers as two attention implementations, so that it serves every family: PACKED uses torch's
operations, PACKED_CPU_KERNELS uses the C++ kernels (modeling/cpu_kernels) for fp32 and bf16 on a CPU. On a CPU PACKED
uses matrix products, because torch's fused kernel is slower there (6 times where fp32 goes through oneDNN, and in
bf16); on a GPU it uses the fused kernel.

Shapes: B rows, H heads, T columns, N tokens of all rows, W width of a head.
"""

from itertools import islice

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from stages.modeling.cpu_kernels import attention as kernels
from stages.modeling.cpu_kernels.build import apply, supports
from stages.modeling.packed import varlen
from stages.modeling.packed.sequences import PackedBatch
from stages.modeling.torch_setup import product_dtype

PACKED, PACKED_CPU_KERNELS = "packed", "packed_cpu_kernels"
BLOCK_QUERIES = 192  # rows of 768 tokens take a quarter of the time; smaller blocks gain nothing more
NO_MASK = torch.empty(1, 1, 1, 1)  # four dimensions: Transformers passes it on and builds no mask of its own


def register() -> None:
    """Register both implementations with Transformers. Idempotent; loading a model does it."""
    for name, function in ((PACKED, attend), (PACKED_CPU_KERNELS, attend_with_kernels)):
        AttentionInterface.register(name, function)
        AttentionMaskInterface.register(name, sdpa_mask)


@torch.compiler.disable
def attend(
    module, query, key, value, attention_mask, scaling=None, dropout=0.0, sliding_window=None, batch=None,
    cpu_kernels=False, softcap=None, **more
):
    """Attend with torch's operations (Transformers' attention interface).

    Args:
        query: [B, H, T, W], or [1, H, N, W] with a `batch`.
        batch: a PackedBatch, or a decoder's PackedKVCache, which determines the keys that each query attends to.
        softcap: if given, scores become softcap * tanh(scores / softcap), as in Gemma 2.

    Returns:
        [B, T, H, W] and None (no attention weights).
    """
    changes = [name for name in ("position_bias", "s_aux") if more.get(name) is not None]
    if changes:
        raise ValueError(f"{module.config.model_type} shifts its attention scores ({', '.join(changes)}): "
                         f"such families are not supported")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    if batch is None and query.device.type != "cpu" and softcap is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **more)
    if isinstance(batch, PackedBatch) and cpu_kernels and softcap is None and supports(query, key, value):
        return apply(_KernelAttention, query, key, value, batch, scaling, sliding_window), None
    if (isinstance(batch, PackedBatch) and softcap is None
            and varlen.supports(query, dtype := product_dtype(query))):
        return varlen.attend_varlen(query, key, value, batch.varlen_index, scaling, sliding_window, dtype), None
    groups = query.shape[1] // key.shape[1]
    if batch is not None and not isinstance(batch, PackedBatch):
        if batch.cpu_kernels:
            out = kernels.decode(query[:, :, 0], key, value, batch.lengths, scaling, sliding_window)
            return out[:, None], None
        return _decode(query, key, value, batch.mask(sliding_window), scaling, groups, softcap), None
    if groups > 1:
        key, value = (x[:, :, None].expand(-1, -1, groups, -1, -1).flatten(1, 2) for x in (key, value))
    if batch is None:
        return _attend_padded(query, key, value, attention_mask, scaling, dropout, softcap), None
    if softcap is not None:
        return _attend_capped(query, key, value, batch, scaling, sliding_window, softcap), None
    if query.device.type == "cpu":
        return _PackedAttention.apply(query, key, value, batch, scaling, sliding_window), None
    return _attend_fused(query, key, value, batch, scaling, sliding_window), None


@torch.compiler.disable
def attend_with_kernels(*args, **kwargs):
    """Attend like `attend`, with the CPU kernels where they support the tensors."""
    return attend(*args, cpu_kernels=True, **kwargs)


def _decode(query, key, value, mask, scaling: float, groups: int, softcap: float | None) -> torch.Tensor:
    """Attend from one new token per row, query [B, H, 1, W]; heads that share a key take the place of columns."""
    rows, heads, _, width = query.shape
    query = query.reshape(rows, heads // groups, groups, width)
    if query.device.type == "cpu" or softcap is not None:
        out = _attend_padded(query, key, value, mask, scaling, 0.0, softcap)
    else:
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)
    return out.transpose(1, 2).reshape(rows, 1, heads, width)


def _attend_fused(query, key, value, batch: PackedBatch, scaling: float, window: int | None) -> torch.Tensor:
    """Compute _PackedAttention by torch's fused kernel, for a GPU: [1, H, N, W] to [1, N, H, W]."""
    (bucket,) = batch.buckets
    padded = [bucket.pad(x[0].transpose(0, 1)).unflatten(0, (bucket.num_rows, -1)) for x in (query, key, value)]
    columns = bucket.num_columns
    mask = None if window is None or window >= columns else _causal_bias(columns, window, padded[0])
    out = functional.scaled_dot_product_attention(*padded, attn_mask=mask, is_causal=mask is None, scale=scaling)
    packed = out.new_zeros(query.shape[2], query.shape[1], query.shape[3])
    bucket.write(packed, out.flatten(0, 1))
    return packed[None]


def _attend_capped(
    query, key, value, batch: PackedBatch, scaling: float, window: int | None, softcap: float
) -> torch.Tensor:
    """Compute _PackedAttention with capped scores, by torch's own gradients: [1, H, N, W] to [1, N, H, W]."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    out = torch.zeros_like(value)
    for bucket in batch.buckets:
        q, k, v = (bucket.pad(x)[None] for x in (query, key, value))
        mask = _causal_bias(bucket.num_columns, window, q)[0]
        bucket.write(out, _attend_padded(q, k, v, mask, scaling, 0.0, softcap)[0].transpose(0, 1))
    return out[None]


class _PackedAttention(torch.autograd.Function):
    """Causal attention within each packed row, [1, H, N, W] to [1, N, H, W]: three products forward, five backward.

    It works on one block of queries of one bucket at a time, whose scores stay in the core's cache. A column beyond a
    row's end holds some other token. As a key it is in every real query's future; as a query it is never read, and its
    gradient is set to 0.
    """

    @staticmethod
    def forward(ctx, query, key, value, batch: PackedBatch, scaling: float, window: int | None):
        dtype = product_dtype(query)
        query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
        out, saved = batch.allocate(value), []
        bias = _causal_bias(batch.buckets[-1].num_columns, window, query)
        with torch.autocast("cpu", enabled=False):
            for bucket in batch.buckets:
                q, k, v = (bucket.pad(x) for x in (query, key, value))
                saved += (q, k, v)
                outputs = []
                for block in _blocks(bucket.num_columns):
                    keys = slice(0, block.stop)
                    scores = torch.baddbmm(bias[:, block, keys], q[:, block], k[:, keys].transpose(1, 2), alpha=scaling)
                    saved.append(scores.softmax(-1))
                    outputs.append(torch.bmm(saved[-1], v[:, keys]))
                bucket.write(out, torch.cat(outputs, 1) if len(outputs) > 1 else outputs[0])
        ctx.save_for_backward(*saved)
        ctx.batch, ctx.scaling = batch, scaling
        return out[None]

    @staticmethod
    def backward(ctx, grad_out):
        saved, batch = iter(ctx.saved_tensors), ctx.batch
        grad_out = grad_out[0]
        grads = [batch.allocate(grad_out) for _ in range(3)]
        for bucket in batch.buckets:
            query, key, value, *weights = islice(saved, 3 + len(_blocks(bucket.num_columns)))
            padded = bucket.pad(grad_out.to(query.dtype))
            padded.view(bucket.num_rows, -1, *padded.shape[1:]).mul_(bucket.mask)
            bucket_grads = _bucket_gradients(query, key, value, padded, weights, ctx.scaling)
            for grad, bucket_grad in zip(grads, bucket_grads, strict=True):
                bucket.add_gradients(grad, bucket_grad)
        return *(x.transpose(0, 1)[None] for x in grads), None, None, None


class _KernelAttention(torch.autograd.Function):
    """_PackedAttention by the CPU kernels, which recompute the attention weights in the backward pass."""

    @staticmethod
    def forward(ctx, query, key, value, batch: PackedBatch, scaling: float, window: int | None):
        dtype = product_dtype(query)
        states = [kernels.contiguous_heads(x[0].transpose(0, 1).to(dtype)) for x in (query, key, value)]
        out, softmax_stats = kernels.forward(*states, batch, scaling, window)
        ctx.save_for_backward(*states, softmax_stats)
        ctx.arguments, ctx.dtypes = (batch, scaling, window), [x.dtype for x in (query, key, value)]
        return out[None]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        *states, softmax_stats = ctx.saved_tensors
        grad_out = kernels.contiguous_heads(grad_out[0].to(states[0].dtype))
        grads = kernels.backward(*states, grad_out, softmax_stats, *ctx.arguments)
        grads = [x.to(dtype).transpose(0, 1)[None] for x, dtype in zip(grads, ctx.dtypes, strict=True)]
        return *grads, None, None, None


def _bucket_gradients(
    query, key, value, grad_out, weights: list[torch.Tensor], scaling: float
) -> tuple[torch.Tensor, ...]:
    """Compute the gradients of query, key and value, all [H, T, W]; weights: attention weights of each block."""
    grads = []
    for block, block_weights in zip(_blocks(query.shape[1]), weights, strict=True):
        keys, block_grad = slice(0, block.stop), grad_out[:, block]
        scores = torch.bmm(block_grad, value[:, keys].transpose(1, 2))
        scores = torch._softmax_backward_data(scores, block_weights, -1, scores.dtype)
        grads.append((
            torch.bmm(scores, key[:, keys]).mul_(scaling),
            torch.bmm(scores.transpose(1, 2), query[:, block]).mul_(scaling),
            torch.bmm(block_weights.transpose(1, 2), block_grad),
        ))
    if len(grads) == 1:
        return grads[0]
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for block, (q, k, v) in zip(_blocks(query.shape[1]), grads, strict=True):
        grad_query[:, block] = q
        grad_key[:, : block.stop] += k
        grad_value[:, : block.stop] += v
    return grad_query, grad_key, grad_value


def _blocks(columns: int) -> list[slice]:
    """Split a bucket's queries into blocks. Keys after a block are in the future of all its queries, and left out."""
    return [slice(first, min(first + BLOCK_QUERIES, columns)) for first in range(0, columns, BLOCK_QUERIES)]


def _causal_bias(columns: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Build [1, T, T]: 0 where a query (row) may attend to a key (column), -inf elsewhere."""
    hidden = like.new_full((1, columns, columns), float("-inf"))
    future = hidden.triu(1)
    return future if window is None else future + hidden.tril(-window)


def _attend_padded(
    query, key, value, mask, scaling: float, dropout: float, softcap: float | None = None
) -> torch.Tensor:
    """Attend within padded rows [B, H, T, W]; mask: True or 0 where a key is visible, None: causal."""
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is None and query.shape[2] > 1:
        mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    weights = functional.dropout(scores.float().softmax(-1).to(value.dtype), dropout)
    return (weights @ value).transpose(1, 2).contiguous()
