"""Compute torch's varlen_attn by plain operations, row by row, for the CPU: what its documentation says."""

import torch


def varlen_attn(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux=None, scale=None, window_size=(-1, -1),
    enable_gqa=False, seqused_k=None, block_table=None, num_splits=None
):
    """Attend from the queries [Tq, H, W] of each row to its keys and values [Tk, Hkv, W].

    The mask is aligned at the last query and the last key of a row, as FlashAttention's is since version 2.1.
    """
    assert return_aux is None and seqused_k is None and block_table is None and num_splits is None
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and len(cu_seq_q) == len(cu_seq_k)
    assert int(cu_seq_q[-1]) == len(query) and int(cu_seq_k[-1]) == len(key) == len(value)
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert query.dtype == key.dtype == value.dtype and query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert enable_gqa or query.shape[1] == key.shape[1]
    groups, scale = query.shape[1] // key.shape[1], query.shape[-1] ** -0.5 if scale is None else scale
    rows = []
    for (q0, q1), (k0, k1) in zip(_spans(cu_seq_q), _spans(cu_seq_k), strict=True):
        keys, values = (x[k0:k1].repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("qhw,khw->hqk", query[q0:q1], keys) * scale
        last = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        column, (left, right) = torch.arange(k1 - k0), window_size
        visible = torch.ones_like(last >= column)
        visible = visible if right < 0 else visible & (column <= last + right)
        visible = visible if left < 0 else visible & (column >= last - left)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        rows.append(torch.einsum("hqk,khw->qhw", weights, values))
    return torch.cat(rows)


def _spans(starts):
    return list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
