"""How a trunk's layers are called: compiled, recomputed in the backward pass.

Transformers' own checkpointing needs the model in training mode, where families that drop out by hand would do so, and
its recomputation knows nothing of adapters that were switched in between.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.modeling.adapters import active_adapter

COMPILED_VARIANTS = 64  # of a layer: by role, place, gradients, kinds of shapes


class Layers:
    """gradient_checkpointing: a layer's activations are made anew in the backward pass (arXiv 1604.06174), by
    non-reentrant checkpoints. compiled: each layer goes through torch.compile, for all shapes at once."""

    def __init__(self, gradient_checkpointing: bool, compiled: bool):
        self.gradient_checkpointing, self.compiled = gradient_checkpointing, compiled
        self._compiled: dict[nn.Module, Callable] = {}

    @contextmanager
    def called(self, trunk: nn.Module, role: str | None) -> Iterator[None]:
        """Forward passes in here call the layers so; role: of the adapter that is on."""
        recomputed = self.gradient_checkpointing and torch.is_grad_enabled()
        if not (recomputed or self.compiled):
            yield
            return
        layers = [layer for layer in trunk.modules() if isinstance(layer, GradientCheckpointingLayer)]
        before = [layer.__dict__.get("forward") for layer in layers]
        for layer in layers:
            forward = self._compiled_forward(layer) if self.compiled else layer.forward
            layer.forward = _recomputed(forward, layer, role) if recomputed else forward
        try:
            yield
        finally:
            for layer, own in zip(layers, before, strict=True):
                if own is None:
                    del layer.forward
                else:
                    layer.forward = own

    def _compiled_forward(self, layer: nn.Module) -> Callable:
        if layer not in self._compiled:
            self._compiled[layer] = torch.compile(layer.forward, dynamic=True, recompile_limit=COMPILED_VARIANTS)
        return self._compiled[layer]


def _recomputed(forward: Callable, layer: nn.Module, role: str | None) -> Callable:
    # By the time of the backward pass another role may be on.
    contexts = lambda: (nullcontext(), active_adapter(layer, role))  # noqa: E731
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
