"""Top-k and top-p sampling with the filtered distribution scored as well.

A filter that only the sampler knew would bias every ratio and every KL: the tokens that it kept are remembered, and
old, new and reference log-probabilities are all of the softmax over these (the rest has probability 0 under each).
Shapes: M tokens, V vocabulary, K tokens kept at most.
"""

import torch


def kept_tokens(scores: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Ids [M, K] of the top_k likeliest tokens, by log-probabilities [M, V]; of these, -1 for what lies beyond the
    likeliest that together hold top_p of the k's probability (the first is always kept)."""
    likeliest = scores.topk(min(top_k, scores.shape[-1]), dim=-1)
    shares = likeliest.values.softmax(-1)
    before = shares.cumsum(-1) - shares
    return torch.where(before < top_p, likeliest.indices, -1)


