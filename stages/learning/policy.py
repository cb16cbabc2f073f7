"""The policy, its reference and its value function, on one frozen base; see roles.py.

The policy is an adapter on the base, or a whole model that learns (then the base is a frozen copy of it); the reference
is the base alone. Values come from a head on the policy's last hidden state, whose gradient flows into the policy as in
TRL's AutoModelForCausalLMWithValueHead, or from an adapter of their own.

Dropout is off throughout: old, new and reference log-probabilities must come from the same function.
Shapes: B rows, R response tokens, N tokens of all rows, M response tokens of all rows, D width.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.learning.families import trunk, width
from stages.learning.models import (
    adapted_layers,
    autocast,
    chunks_by_length,
    last_hidden_states,
    plain,
    ragged_states,
)
from stages.learning.output_layer import log_probabilities
from stages.learning.ragged import Texts, by_row, response_tokens
from stages.learning.roles import (
    POLICY,
    VALUE,
    RewardRole,
    SharedScorer,
    acting_as,
    add_role,
    parameters_of,
    replaced_forwards,
)
from stages.learning.weights import save_adapter, save_adapters

COMPILED_VARIANTS = 64  # of a layer: by role, place, gradients, kinds of shapes


class Scored(NamedTuple):
    """What a forward pass says of given responses; all [B, R], fp32, 0 outside the mask."""

    log_p: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor


class Policy(nn.Module):
    """A causal model with a LoRA adapter, or one that learns whole, and a linear value head.

    The head starts at 0 ("The N Implementation Details of RLHF with PPO") unless `values_start_from` is called.
    gradient_checkpointing: updates recompute a layer's activations in the backward pass, sampling is not touched.
    compiled: layers are compiled by torch.compile in all forward passes but sampling's.
    """

    def __init__(
        self, model, temperature: float, precision: str, *, gradient_checkpointing: bool = False, compiled: bool = False
    ):
        super().__init__()
        self.model, self.temperature, self.precision = model.eval(), temperature, precision
        _check_head(self.causal, precision)
        self.frozen_copy = None if isinstance(model, PeftModel) else deepcopy(model).requires_grad_(False)
        self.gradient_checkpointing, self.compiled = gradient_checkpointing, {} if compiled else None
        self.samples_values = True
        self.value_head = nn.Linear(width(self.causal), 1, device=model.device, dtype=torch.float32)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def causal(self) -> nn.Module:
        """The policy's model under its adapters, if it has any."""
        return plain(self.model)

    @property
    def base(self) -> nn.Module:
        """The model whose own weights are frozen: reference, and carrier of the other roles' adapters."""
        return self.model if self.frozen_copy is None else self.frozen_copy

    def values_start_from(self, reward: Path) -> None:
        """Give the value function an adapter of its own: a copy of the reward adapter in `reward`, score head and all.

        To be called before an optimiser is made. From then on sampling knows no values: see `with_values`.
        """
        self._carry(*add_role(self.base, reward, VALUE, learns=True)[:1])

    def trained(self) -> dict[str, nn.Parameter]:
        """Name to parameter, of everything that learns; tied weights once."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}
