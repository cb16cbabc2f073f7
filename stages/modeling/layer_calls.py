"""Call a backbone's layers compiled, or with activation checkpointing.

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

COMPILED_VARIANTS = 64  # of one layer: adapters, layer index, gradients, kinds of shapes


class LayerCalls:
    """How the layers of a backbone are called.

    Args:
        gradient_checkpointing: recompute a layer's activations in the backward pass (arXiv 1604.06174), by
            non-reentrant checkpoints.
        compiled: call each layer through torch.compile, with dynamic shapes.
    """

    def __init__(self, gradient_checkpointing: bool, compiled: bool):
        self.gradient_checkpointing, self.compiled = gradient_checkpointing, compiled
        self._compiled: dict[nn.Module, Callable] = {}

    @contextmanager
    def applied_to(self, backbone: nn.Module, adapter: str | None) -> Iterator[None]:
        """Call the layers of `backbone` this way while open; adapter: the active one."""
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        if not (recomputed or self.compiled):
            yield
            return
        layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
        previous = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            forward = self._compiled_forward(layer) if self.compiled else layer.forward
            layer.forward = _checkpoint_forward(forward, layer, adapter) if recomputed else forward
        try:
            yield
        finally:
            for layer, own in zip(layers, previous, strict=True):
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def _compiled_forward(self, layer: nn.Module) -> Callable:
        if layer not in self._compiled:
            self._compiled[layer] = torch.compile(layer.forward, dynamic=True, recompile_limit=COMPILED_VARIANTS)
        return self._compiled[layer]


def _checkpoint_forward(forward: Callable, layer: nn.Module, adapter: str | None) -> Callable:
    # Another adapter may be active by the time of the backward pass.
    contexts = lambda: (nullcontext(), active_adapter(layer, adapter))  # noqa: E731
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
