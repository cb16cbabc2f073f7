"""Call the attention kernels (attention.cpp, decode.cpp) for stages/modeling/packed/attention.py.

Shapes: N tokens, B rows, H query heads, G key heads, W head width, C columns of a cache. The last dimension of queries,
keys and values is contiguous (`contiguous_heads`).
"""

from ctypes import Structure, addressof, c_float, c_int64, c_void_p

import torch

from stages.modeling.cpu_kernels.build import call, load_library, views

NO_WINDOW = 1 << 40


class _RowIndex(Structure):
    _fields_ = [("tokens", c_void_p), ("starts", c_void_p), ("first_queries", c_void_p), ("num_rows", c_int64),
                ("width", c_int64), ("groups", c_int64), ("window", c_int64), ("shares_prefixes", c_int64),
                ("scaling", c_float)]


def simd_width() -> int:
    """Return the number of fp32 values in a vector: the width of a cache's values must be a multiple of it."""
    return int(load_library().simd_width())


def forward(query, key, value, batch, scaling: float, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from query [N, H, W] to key and value [N, G, W].

    Returns [N, H, W] and, for `backward`, each query's largest score and sum of exponentials, [2, H, N] fp32.
    """
    out = batch.allocate(query)
    softmax_stats = torch.empty(2, query.shape[1], query.shape[0])
    rows = _row_index(query, key, batch, scaling, window)
    call("attend_forward", query, *views(query, key, value, out), *softmax_stats, len(query), addressof(rows),
         key.shape[1])
    return out, softmax_stats


def backward(query, key, value, grad_out, softmax_stats, batch, scaling: float, window: int | None):
    """Compute the gradients of query, key and value from that of `forward`'s result."""
    grads = [batch.allocate(x) for x in (query, key, value)]
    rows = _row_index(query, key, batch, scaling, window)
    call("attend_backward", query, *views(query, key, value, grad_out), *softmax_stats, len(query), *views(*grads),
         addressof(rows), key.shape[1])
    return grads


def decode(query, keys, values, lengths, scaling: float, window: int | None) -> torch.Tensor:
    """Attend from each row's newest token, query [B, H, W], to a cache: [B, H, W].

    keys [B, G, W, C]; values [B, G, C, W rounded up to a multiple of `simd_width`], C a multiple of it as well; lengths
    [B]: columns in use.
    """
    query = contiguous_heads(query.to(keys.dtype))
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = _RowIndex(num_rows=len(query), width=query.shape[2], groups=query.shape[1] // keys.shape[1],
                     window=window or NO_WINDOW, scaling=scaling)
    call("decode", query, *views(query, out), keys, values, lengths, keys.shape[3], addressof(rows), keys.shape[1])
    return out


def append_key_value(key, value, keys, values, lengths) -> None:
    """Write each row's newest key and value, [B, G, W], to column `lengths` - 1 of a cache in `decode`'s layout."""
    key, value = (contiguous_heads(x.to(keys.dtype)) for x in (key, value))
    call("append_key_value", key, *views(key, value), keys, values, lengths, len(key), *keys.shape[1:])


def contiguous_heads(states: torch.Tensor) -> torch.Tensor:
    """Make the last dimension of [·, heads, W] contiguous."""
    return states if states.stride(2) == 1 else states.contiguous()


def _row_index(query, key, batch, scaling: float, window: int | None) -> _RowIndex:
    index = batch.row_index
    return _RowIndex(index.tokens.data_ptr(), index.starts.data_ptr(), index.first_queries.data_ptr(),
                     len(index.first_queries), query.shape[2], query.shape[1] // key.shape[1], window or NO_WINDOW,
                     batch.shares_prefixes, scaling)
