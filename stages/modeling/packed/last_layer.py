"""Compute the last layer's MLP only at the positions whose hidden states are needed.

The MLP works token by token, and its output at other positions is never read. Where half of the tokens are prompts,
this saves 5 % of a PPO iteration's CPU time and 8 % of a reward step's (a LLaMA of 4 layers, width 128).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from stages.modeling.packed.sequences import round_up_tokens


@contextmanager
def mlp_at_positions(backbone: nn.Module, positions: torch.Tensor, tokens: int) -> Iterator[None]:
    """Make forward passes over `tokens` tokens [1, N, D] correct at `positions` [M] only, for as long as this is open.

    All positions are computed in a family whose layers have no `mlp` (OPT) and in layers that are compiled or
    recomputed (layer_calls.LayerCalls, Transformers): hooks would force a compilation, or be gone at recomputation.
    """
    layers = [layer for layer in backbone.modules() if hasattr(layer, "mlp")]
    if not layers or "forward" in vars(layers[-1]) or getattr(layers[-1], "gradient_checkpointing", False):
        yield
        return
    mlp = layers[-1].mlp
    computed = _fill_to_round_size(positions, tokens)

    def select(mlp: nn.Module, inputs: tuple) -> tuple:
        return (inputs[0].index_select(1, computed), *inputs[1:])

    def scatter(mlp: nn.Module, inputs: tuple, out: torch.Tensor) -> torch.Tensor:
        return out.new_zeros(1, tokens, out.shape[2]).index_copy(1, computed, out)

    hooks = [mlp.register_forward_pre_hook(select), mlp.register_forward_hook(scatter)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _fill_to_round_size(positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """Add positions up to a round size, in order, so that few different sizes occur (sequences.round_up_tokens)."""
    computed = torch.zeros(tokens, dtype=torch.bool, device=positions.device).index_fill_(0, positions, True)
    count = int(computed.sum())
    computed[(~computed).nonzero().squeeze(-1)[: round_up_tokens(count) - count]] = True
    return computed.nonzero().squeeze(-1)
