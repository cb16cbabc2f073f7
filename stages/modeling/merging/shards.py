"""Merge adapters into the safetensors files of a base, one tensor at a time, and write the result shard by shard.

Memory holds the shard that is written and one tensor of the base in fp32. PEFT's layers compute the changes, as in a
merge of the whole model, so that the bytes are the same. The files and their index are those of `save_pretrained`.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from stages.modeling.lora import unwrap_peft
from stages.modeling.pretrained import ADAPTER_WEIGHTS
from stages.modeling.tokenizer import mean_row
from stages.runtime.environment import return_freed_memory
from stages.runtime.files import write_text

FILE_PATTERN, INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
LAYER_TOLERANCE = 1e-4  # of the largest output of a matrix in fp32: adapter beside it, or merged into it


class AdapterLayers:
    """What one adapter changes in the model that it is loaded on: layers, whole tensors, and rows of new tokens.

    rows: of the embedding that the adapter was trained on.
    """

    def __init__(self, model: PeftModel, adapter: Path, rows: int):
        modules = unwrap_peft(model).named_modules()
        self.layers = {name.removesuffix(".token_adapter"): module for name, module in modules
                       if isinstance(module, LoraLayer | TrainableTokensLayer)}
        saved = load_file(adapter / ADAPTER_WEIGHTS)
        self.whole = {_plain_name(name): tensor for name, tensor in saved.items()
                      if ".lora_" not in name and not name.endswith("trainable_tokens_delta")}
        self.token_rows = {_plain_name(name): tensor for name, tensor in saved.items()
                           if name.endswith("trainable_tokens_delta")}
        self.rows = rows

    @torch.no_grad()
    def measure_changes(self) -> list[dict]:
        """Measure the change of every matrix, before the adapter is merged.

        `change_norm` is the Frobenius norm of what will be added (alpha / r * B @ A), `relative_change` its ratio to
        the matrix's own norm. Trained rows of an embedding are included, once if the output layer is tied to it.
        """
        rows = []
        for name, layer in self.layers.items():
            weight = layer.get_base_layer().weight
            if isinstance(layer, LoraLayer):
                change = layer.get_delta_weight("default")
            elif layer.tied_adapter is None:
                change = layer.trainable_tokens_delta["default"] - weight[layer.token_indices["default"]]
            else:
                continue
            norm = float(change.float().norm())
            rows.append({"name": name, "change_norm": norm, "relative_change": norm / float(weight.float().norm())})
        return rows

    def merge(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor with this adapter; tensor: before it, in fp32."""
        path, _, leaf = name.rpartition(".")
        layer = self.layers.get(path) if leaf == "weight" else None
        if name in self.whole:
            return self.whole[name].float()
        if isinstance(layer, TrainableTokensLayer):
            token_rows = self.token_rows.get(path, layer.trainable_tokens_delta["default"].detach()).float()
            return tensor.index_copy(0, torch.tensor(layer.token_indices["default"]), token_rows.cpu())
        return tensor if layer is None else _merge_layer(layer, path, tensor)


@torch.no_grad()
def _merge_layer(layer: LoraLayer, path: str, weight: torch.Tensor) -> torch.Tensor:
    """Add an adapter's change; ValueError if the merged layer computes something else than the adapter beside it."""
    for part in (layer.lora_A, layer.lora_B, layer.lora_embedding_A, layer.lora_embedding_B):
        part.to("cpu")
    merged = weight + layer.get_delta_weight("default").float()
    if not isinstance(layer.get_base_layer(), nn.Embedding):
        inputs = torch.randn(4, layer.in_features, generator=torch.Generator().manual_seed(0))
        change = layer.scaling["default"] * layer.lora_B["default"](layer.lora_A["default"](inputs))
        before, after = (inputs @ (matrix if layer.fan_in_fan_out else matrix.T) for matrix in (weight, merged))
        difference, allowed = (after - before - change).abs().max(), LAYER_TOLERANCE * (before + change).abs().max()
        if not difference <= allowed:
            raise ValueError(f"{path} merged differs from base and adapter by {float(difference):.2g} in an output "
                             f"(allowed: {float(allowed):.2g}): nothing is published")
    return merged


class MergedTensors:
    """Compute merged tensors in fp32 from a base's files, by the names that the model's state has."""

    def __init__(self, folder: Path, adapters: list[AdapterLayers], model: PreTrainedModel):
        self.adapters = adapters
        self._files = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _tensor_names(file)}
        self._prefix = f"{model.base_model_prefix}."
        vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
        self._vocabulary = {f"{name}.{leaf}" for name, module in model.named_modules() if module in vocabulary
                            for leaf in module._parameters}

    def has(self, name: str) -> bool:
        """Check whether the files or an adapter hold this tensor."""
        return self._stored_name(name) in self._files or any(name in adapter.whole for adapter in self.adapters)

    def merge(self, name: str) -> torch.Tensor:
        """Merge all adapters, in their order, into one tensor of the base."""
        stored = self._stored_name(name)
        tensor = torch.empty(0)  # of a tensor that an adapter brings
        if stored in self._files:
            with safe_open(self._files[stored], "pt") as tensors:  # opened anew: an open file's pages stay in memory
                tensor = tensors.get_tensor(stored).to(torch.float32, copy=True)
        for adapter in self.adapters:
            if name in self._vocabulary and 0 < len(tensor) < adapter.rows:
                tensor = torch.cat([tensor, mean_row(tensor).expand(adapter.rows - len(tensor), *tensor.shape[1:])])
            tensor = adapter.merge(name, tensor)
        return tensor

    def _stored_name(self, name: str) -> str:
        """Name of a tensor in the files: some bases, as GPT-2, are stored without the head's prefix."""
        return name if name in self._files else name.removeprefix(self._prefix)


def can_stream(model: PreTrainedModel, tensors: MergedTensors) -> bool:
    """Check whether each tensor is one of the files plus a product of LoRA: some families convert them on loading."""
    is_plain = not any(layer.lora_variant or any(layer.lora_bias.values()) for adapter in tensors.adapters
                       for layer in adapter.layers.values() if isinstance(layer, LoraLayer))
    is_stored = not getattr(model, "_weight_conversions", None) and not getattr(model, "hf_quantizer", None)
    return is_plain and is_stored and all(tensors.has(name) for name, _ in model.named_parameters())


def write_shards(model: PreTrainedModel, tensors: MergedTensors, out: Path, dtype: torch.dtype, max_shard_bytes: int
                 ) -> None:
    """Write config and weights in this dtype as `save_pretrained` does; the model's own weights are freed."""
    model.config.dtype, model.config.architectures = str(dtype).split(".")[1], [type(model).__name__]
    model.config.save_pretrained(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    parameters = sorted(model.named_parameters(), key=lambda item: dot_natural_key(item[0]))
    split = split_torch_state_dict_into_shards(
        {name: torch.empty_like(parameter, device="meta", dtype=dtype) for name, parameter in parameters},
        filename_pattern=FILE_PATTERN, max_shard_size=max_shard_bytes)
    index = {"metadata": {"total_parameters": model.num_parameters(), **split.metadata},
             "weight_map": split.tensor_to_filename}
    for _, parameter in parameters:
        parameter.data = torch.empty(0)
    return_freed_memory()
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors.merge(name).to(dtype).contiguous() for name in names}, out / file,
                  metadata={"format": "pt"})
    if split.is_sharded:
        write_text(out / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def _plain_name(name: str) -> str:
    """Name a tensor of an adapter's file as the model without an adapter does."""
    for part in (".base_layer", ".token_adapter", ".trainable_tokens_delta"):
        name = name.replace(part, "")
    return name.removeprefix("base_model.model.")
