"""Shift a causal model's logits by Q heads: logits + beta min_i Q_i, the policy that ILQL samples from.

ILQL's shift is beta (min_i Q_i - V). V does not depend on the token, and the softmax does not change if all logits
change by one number, so V is left out: the shifted policy is a causal model with another output layer. That layer
replaces the model's own on the instance, and all that samples or scores with the model does so with the shift.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from stages.modeling.q_heads.files import TENSORS, QHeads, load_q_heads


class ShiftedOutput(nn.Linear):
    """An output layer that adds beta times the smallest Q of the heads to its logits [..., V].

    It has the parameters of the layer it replaces, under the same names. The heads are buffers that are not part of
    the state: saving the model saves the causal model alone (q_heads.files saves the heads).
    """

    def __init__(self, layer: nn.Linear, heads: QHeads):
        nn.Module.__init__(self)  # not Linear's, which would allocate a second matrix
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.weight, self.bias = layer.weight, layer.bias
        self.heads, self.beta = heads.count, heads.beta
        for name, tensor in heads.tensors.items():
            self.register_buffer(self._buffer_name(name), tensor.to(layer.weight.device), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().forward(hidden)
        if not self.beta:
            return logits
        smallest = self._q_values(hidden, 0)
        for head in range(1, self.heads):
            smallest = torch.minimum(smallest, self._q_values(hidden, head))
        return logits + (self.beta * smallest.float()).to(logits.dtype)

    def _q_values(self, hidden: torch.Tensor, head: int) -> torch.Tensor:
        hidden_weight, hidden_bias, out_weight, out_bias = (
            getattr(self, self._buffer_name(f"{head}.{name}")) for name in TENSORS)
        features = functional.relu(functional.linear(hidden.to(hidden_weight.dtype), hidden_weight, hidden_bias))
        return functional.linear(features, out_weight, out_bias)

    @staticmethod
    def _buffer_name(tensor_name: str) -> str:
        return "q_" + tensor_name.replace(".", "_")


def shift_output(model: PreTrainedModel, heads: QHeads) -> nn.Linear:
    """Replace the output layer of this model instance by one with the heads; return the layer that it had.

    Raises ValueError if the heads do not fit the model.
    """
    layer = model.get_output_embeddings()
    sizes = heads.sizes()
    if (sizes["hidden_size"], sizes["vocabulary_tokens"]) != (layer.in_features, layer.out_features):
        raise ValueError(
            f"the Q heads are for {sizes['hidden_size']} hidden units and {sizes['vocabulary_tokens']} tokens, and "
            f"this {model.config.model_type} model has {layer.in_features} and {layer.out_features}: they were trained "
            f"with another model")
    model.set_output_embeddings(ShiftedOutput(layer, heads))
    return layer


def shift_by_folder(model: PreTrainedModel, folder: Path | str) -> None:
    """Shift the logits of this model instance by the Q heads that a folder holds."""
    try:
        shift_output(model, load_q_heads(folder))
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
