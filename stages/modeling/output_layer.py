"""Compute logits from last hidden states as the whole model does: some families cap or scale them after the matrix.

Gemma 2 and 3 cap them, Granite divides and Cohere multiplies them; each by a number of its configuration.
"""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.modeling.families import backbone


class ChangedLogits:
    """An output layer with what its model does to the logits afterwards; it has the layer's weights and sizes."""

    def __init__(self, layer: nn.Module, changes: list[Callable[[torch.Tensor], torch.Tensor]]):
        self.layer, self.changes = layer, changes
        self.weight, self.bias = layer.weight, getattr(layer, "bias", None)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self.layer(hidden)
        for change in self.changes:
            logits = change(logits)
        return logits


def output_layer(model: PreTrainedModel) -> nn.Module | ChangedLogits:
    """Return what computes a causal model's logits from its last hidden states."""
    layer, config, changes = model.get_output_embeddings(), model.config, []
    divisor, factor, cap = (getattr(config, name, None)
                            for name in ("logits_scaling", "logit_scale", "final_logit_softcapping"))
    if divisor not in (None, 1):
        changes.append(lambda logits: logits / divisor)
    if factor not in (None, 1):
        changes.append(lambda logits: logits * factor)
    if cap is not None:
        changes.append(lambda logits: torch.tanh(logits / cap) * cap)
    return ChangedLogits(layer, changes) if changes else layer


def probe_inputs(model: PreTrainedModel) -> dict:
    """Return the arguments of a forward pass of two tokens."""
    ids = torch.arange(2, device=model.device)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}


@torch.no_grad()
def check_logits(model: PreTrainedModel) -> None:
    """Raise ValueError if a causal model's own logits are not those of `output_layer`.

    Training would compute another distribution than the model's. The KL to the reference does not show it: both are
    computed alike.
    """
    inputs = probe_inputs(model)
    own = model(**inputs).logits
    computed = output_layer(model)(backbone(model)(**inputs).last_hidden_state)
    if not (own - computed).abs().max() <= 4 * torch.finfo(computed.dtype).eps * computed.abs().max():
        raise ValueError(f"{model.config.model_type} changes its logits after the output layer in a way that is not "
                         f"known here: choose a base of another family")
