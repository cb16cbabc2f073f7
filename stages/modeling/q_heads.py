"""Q heads that shift a model's logits: their files (q_heads.safetensors, q_heads.json) and the shifted output layer.

Head i is a perceptron with the tensors i.hidden.weight [H, D], i.hidden.bias [H], i.out.weight [V, H] and i.out.bias
[V], for a model of hidden size D with V tokens. The JSON file has their number, these sizes, and beta, the weight of
the shift.

The logits become logits + beta min_i Q_i, those of the policy that ILQL samples from. ILQL's shift is beta (min_i Q_i -
V). V does not depend on the token, and the softmax does not change if all logits change by one number, so V is left
out: the shifted policy is a causal model with another output layer. That layer replaces the model's own on the
instance, and all that samples or scores with the model does so with the shift.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel

from stages.modeling.finite_weights import DIVERGED, check_finite
from stages.runtime.files import check_free_space, link_or_copy, read_json_object, write_json
from stages.runtime.processes import is_main

WEIGHTS, SETTINGS = "q_heads.safetensors", "q_heads.json"
TENSORS = ("hidden.weight", "hidden.bias", "out.weight", "out.bias")


class QHeads(NamedTuple):
    """Q heads by the names of their tensors, and beta, the weight of the shift."""

    tensors: dict[str, torch.Tensor]
    beta: float

    @property
    def count(self) -> int:
        """Number of heads."""
        return len(self.tensors) // len(TENSORS)

    def describe(self) -> dict[str, int | float]:
        """Return the content of the JSON file: sizes and beta."""
        vocabulary, width = self.tensors["0.out.weight"].shape
        return {"heads": self.count, "hidden_size": self.tensors["0.hidden.weight"].shape[1], "width": width,
                "vocabulary_tokens": vocabulary, "beta": self.beta}


def has_q_heads(folder: Path | str) -> bool:
    """Check whether a model's folder holds Q heads."""
    return (Path(folder) / SETTINGS).is_file() or (Path(folder) / WEIGHTS).is_file()


def save_q_heads(heads: QHeads, out: Path) -> None:
    """Save Q heads; ValueError if a weight is not finite. Of several processes, only the first one saves."""
    check_finite(heads.tensors.items(), DIVERGED)
    if not is_main():
        return
    check_free_space("the Q heads", out, sum(tensor.nbytes for tensor in heads.tensors.values()))
    save_file({name: t.detach().float().cpu().contiguous() for name, t in heads.tensors.items()}, out / WEIGHTS)
    write_json(out / SETTINGS, heads.describe())


def load_q_heads(folder: Path | str) -> QHeads:
    """Load Q heads; ValueError if a file is missing or damaged, or if both disagree."""
    folder = Path(folder)
    settings = read_json_object(folder / SETTINGS) or {}
    try:
        heads = QHeads(load_file(folder / WEIGHTS), settings["beta"])
        agree = heads.describe() == settings
    except (OSError, SafetensorError, KeyError) as error:
        raise ValueError(f"{WEIGHTS} or {SETTINGS} cannot be read ({error}): copy both files of the Q heads, "
                         f"or run the merge again") from None
    if not agree:
        raise ValueError(f"{folder / WEIGHTS} does not have the sizes in {SETTINGS}: copy both files from one folder")
    check_finite(heads.tensors.items(), f"{folder / WEIGHTS} is damaged, or its training diverged")
    return heads


def copy_q_heads(source: Path, out: Path) -> None:
    """Copy the files of the Q heads from one folder to another, as hard links if possible."""
    for name in (WEIGHTS, SETTINGS):
        link_or_copy(source / name, out / name)


class ShiftedOutput(nn.Linear):
    """An output layer that adds beta times the smallest Q of the heads to its logits [..., V].

    It has the parameters of the layer it replaces, under the same names. The heads are buffers that are not part of
    the state: saving the model saves the causal model alone (`save_q_heads` saves the heads).
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
    sizes = heads.describe()
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
