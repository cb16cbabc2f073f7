"""Attention on a CPU by kernels of our own, attention.cpp; what calls them is stages/modeling/packed/attention.py.

Shapes: N tokens, B rows, H heads, G heads of keys, W width of a head, C columns of a cache. Of states, the last
dimension lies in one piece (`in_one_piece`).
"""

from ctypes import Structure, addressof, c_float, c_int64, c_void_p

import torch

from stages.modeling.cpu_kernels.bindings import call, views
from stages.modeling.cpu_kernels.build import library

NO_WINDOW = 1 << 40


class _Rows(Structure):
    _fields_ = [("tokens", c_void_p), ("starts", c_void_p), ("firsts", c_void_p), ("rows", c_int64),
                ("width", c_int64), ("groups", c_int64), ("window", c_int64), ("shares", c_int64),
                ("scaling", c_float)]


def lanes() -> int:
    """A cache's values are this many wide, or a multiple of it."""
    return int(library().attend_lanes())


def forward(query, key, value, batch, scaling: float, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Query [N, H, W], key and value [N, G, W] to what was attended to [N, H, W]; and, for `backward`, each query's
    largest score and the sum of its exponentials, [2, H, N] fp32."""
    out = _like(query, batch)
    sums = torch.empty(2, query.shape[1], query.shape[0])
    rows = _rows(query, key, batch, scaling, window)
    call("attend_forward", query, *views(query, key, value, out), *sums, len(query), addressof(rows), key.shape[1])
    return out, sums


def backward(query, key, value, gradient, sums, batch, scaling: float, window: int | None):
    """Gradients of query, key and value, from that of what `forward` gave."""
    found = [_like(x, batch) for x in (query, key, value)]
    rows = _rows(query, key, batch, scaling, window)
    call("attend_backward", query, *views(query, key, value, gradient), *sums, len(query), *views(*found),
         addressof(rows), key.shape[1])
    return found


def newest(query, keys, values, lengths, scaling: float, window: int | None) -> torch.Tensor:
    """Of each row's newest token, query [B, H, W], to [B, H, W], over keys [B, G, W, C], values [B, G, C, W or more].

    C is a multiple of `lanes`, and so is the values' width; lengths [B]: columns in use.
    """
    query = in_one_piece(query.to(keys.dtype))
    out = torch.empty(query.shape, dtype=query.dtype)
    rows = _Rows(rows=len(query), width=query.shape[2], groups=query.shape[1] // keys.shape[1],
                 window=window or NO_WINDOW, scaling=scaling)
    call("attend_newest", query, *views(query, out), keys, values, lengths, keys.shape[3], addressof(rows),
         keys.shape[1])
    return out


def append(key, value, keys, values, lengths) -> None:
    """Each row's newest key and value, [B, G, W], to their column of a cache as `newest` reads it."""
    key, value = (in_one_piece(x.to(keys.dtype)) for x in (key, value))
    call("append_newest", key, *views(key, value), keys, values, lengths, len(key), *keys.shape[1:])


def in_one_piece(states: torch.Tensor) -> torch.Tensor:
    """[·, heads, W] with the values of a head side by side."""
    return states if states.stride(2) == 1 else states.contiguous()


def _like(states: torch.Tensor, batch) -> torch.Tensor:
    """To be written to, in one piece; 0 where no row's token stands, and everywhere if rows add up."""
    if batch.shares:
        return torch.zeros(states.shape, dtype=states.dtype)
    found = torch.empty(states.shape, dtype=states.dtype)
    found[batch.tokens :] = 0
    return found


def _rows(query, key, batch, scaling: float, window: int | None) -> _Rows:
    order = batch.order
    return _Rows(order.tokens.data_ptr(), order.starts.data_ptr(), order.firsts.data_ptr(), len(order.firsts),
                 query.shape[2], query.shape[1] // key.shape[1], window or NO_WINDOW, batch.shares, scaling)
