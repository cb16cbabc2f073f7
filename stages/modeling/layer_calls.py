"""Call a backbone's layers with activation checkpointing.

Transformers' own checkpointing requires training mode, in which some families apply dropout, and its recomputation
does not restore the adapter that was active in the forward pass.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.modeling.adapters import active_adapter


class LayerCalls:
    """How the layers of a backbone are called.

    Args:
        gradient_checkpointing: recompute a layer's activations in the backward pass (arXiv 1604.06174), by
            non-reentrant checkpoints.
    """

    def __init__(self, gradient_checkpointing: bool):
        self.gradient_checkpointing = gradient_checkpointing

    @contextmanager
    def applied_to(self, backbone: nn.Module, adapter: str | None) -> Iterator[None]:
        """Call the layers of `backbone` this way while open; adapter: the active one."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            yield
            return
        layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
        previous = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            layer.forward = _checkpoint_forward(layer.forward, layer, adapter)
        try:
            yield
        finally:
            for layer, own in zip(layers, previous, strict=True):
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own


def _checkpoint_forward(forward: Callable, layer: nn.Module, adapter: str | None) -> Callable:
    # Another adapter may be active by the time of the backward pass.
    contexts = lambda: (nullcontext(), active_adapter(layer, adapter))  # noqa: E731
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
