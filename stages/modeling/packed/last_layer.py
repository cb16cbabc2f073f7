"""The last layer computes its feed-forward block for the tokens whose states are asked for, and for no others.

Their states are the same: the block works token by token, and what comes after it is read at these tokens only. Where
half of the tokens are prompts, it saves a fifteenth of the products of a model of six layers.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stages.modeling.packed.sequences import round_up_tokens


@contextmanager
def only_at(trunk: nn.Module, wanted: torch.Tensor, tokens: int) -> Iterator[None]:
    """Within it a forward pass over `tokens` tokens [1, N, D] has true states at `wanted` [M] alone.

    A family whose layers have no `mlp` (OPT) computes all, and so do layers that are compiled or recomputed (layers.py,
    Transformers): the one would be compiled anew for these hooks, the other computes again when they are gone.
    """
    layers = [layer for layer in trunk.modules() if hasattr(layer, "mlp")]
    if not layers or "forward" in vars(layers[-1]) or getattr(layers[-1], "gradient_checkpointing", False):
        yield
        return
    block = layers[-1].mlp
    places = _to_round_size(wanted, tokens)

    def narrow(block: nn.Module, given: tuple) -> tuple:
        return (given[0].index_select(1, places), *given[1:])

    def widen(block: nn.Module, given: tuple, found: torch.Tensor) -> torch.Tensor:
        return found.new_zeros(1, tokens, found.shape[2]).index_copy(1, places, found)

    hooks = [block.register_forward_pre_hook(narrow), block.register_forward_hook(widen)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _to_round_size(wanted: torch.Tensor, tokens: int) -> torch.Tensor:
    """With some tokens more, in order, so that few sizes occur (see ragged.rounded)."""
    taken = torch.zeros(tokens, dtype=torch.bool, device=wanted.device).index_fill_(0, wanted, True)
    count = int(taken.sum())
    taken[(~taken).nonzero().squeeze(-1)[: round_up_tokens(count) - count]] = True
    return taken.nonzero().squeeze(-1)
