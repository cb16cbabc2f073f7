"""Merge adapters into the safetensors files of a base, one tensor at a time, and write the result shard by shard.

Memory holds the shard that is written and one tensor of the base in fp32. The layers of PEFT do the merging, as in a
merge of the whole model, so that the bytes are the same. The files and their index are those of `save_pretrained`.
"""

import json
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import dot_natural_key

from stages.modeling.compatible_files import add_rope_of_transformers_4
from stages.modeling.lora import unwrap_peft
from stages.modeling.pretrained import ADAPTER_WEIGHTS, PEFT_PREFIX
from stages.runtime.files import write_text

FILE_PATTERN, INDEX = "model{suffix}.safetensors", "model.safetensors.index.json"
LAYER_TOLERANCE = 1e-4  # of the largest output of a matrix in fp32: adapter beside it, or merged into it


class AdapterLayers:
    """What one adapter changes in the model that it is loaded on: layers, and whole tensors, such as a head."""

    def __init__(self, model: PeftModel, adapter: Path):
        self.layers = {name: module for name, module in unwrap_peft(model).named_modules()
                       if isinstance(module, LoraLayer)}
        self.whole = {name.removeprefix(PEFT_PREFIX): tensor
                      for name, tensor in load_file(adapter / ADAPTER_WEIGHTS).items() if ".lora_" not in name}


@torch.no_grad()
def _merge_layer(layer: LoraLayer, path: str, leaf: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Merge with PEFT's layer on the CPU; ValueError if the merged layer computes something else than the adapter."""
    base = layer.get_base_layer()
    before = dict(base._parameters)
    try:
        for name in (name for name, value in before.items() if value is not None):
            base._parameters[name] = nn.Parameter(tensors[f"{path}.{name}"], requires_grad=False)
        layer.to("cpu").merged_adapters.clear()
        inputs = None if isinstance(base, nn.Embedding) else torch.randn(
            4, layer.in_features, generator=torch.Generator().manual_seed(0))
        expected = None if inputs is None else layer(inputs)
        layer.merge(safe_merge=True)
        if expected is not None:
            difference, allowed = (base(inputs) - expected).abs().max(), LAYER_TOLERANCE * expected.abs().max()
            if not difference <= allowed:
                raise ValueError(f"{path} merged differs from base and adapter by {float(difference):.2g} in an output "
                                 f"(allowed: {float(allowed):.2g}): nothing is published")
        return base._parameters[leaf].data
    finally:
        base._parameters.update(before)


class MergedTensors:
    """Compute merged tensors in fp32 from a base's files, by the names that the model's state has."""

    def __init__(self, folder: Path, adapters: list[AdapterLayers], model: PreTrainedModel):
        self.adapters = adapters
        self._files = {name: file for file in sorted(folder.glob("*.safetensors")) for name in _tensor_names(file)}
        self._prefix = f"{model.base_model_prefix}."

    def has(self, name: str) -> bool:
        """Check whether the files or an adapter hold this tensor."""
        return self._stored_name(name) in self._files or any(name in adapter.whole for adapter in self.adapters)

    def merge(self, name: str) -> torch.Tensor:
        """Merge all adapters, in their order, into one tensor of the base."""
        path = name.rpartition(".")[0]
        names = [name]
        if any(path in adapter.layers for adapter in self.adapters):  # merging may need the bias, too
            names += [f"{path}.{leaf}" for leaf in ("weight", "bias") if self.has(f"{path}.{leaf}")]
        tensors = {each: self._load(each) for each in dict.fromkeys(names) if self._stored_name(each) in self._files}
        for adapter in self.adapters:
            tensors |= {each: adapter.whole[each].float() for each in names if each in adapter.whole}
            if path in adapter.layers:
                tensors |= {each: _merge_layer(adapter.layers[path], path, each.rpartition(".")[2], tensors)
                            for each in tensors}
        return tensors[name]

    def _load(self, name: str) -> torch.Tensor:
        stored = self._stored_name(name)
        with safe_open(self._files[stored], "pt") as tensors:  # opened anew: an open file's pages stay in memory
            return tensors.get_tensor(stored).to(torch.float32, copy=True)

    def _stored_name(self, name: str) -> str:
        """Name of a tensor in the files: some bases, as GPT-2, are stored without the head's prefix."""
        return name if name in self._files else name.removeprefix(self._prefix)


def can_stream(model: PreTrainedModel, tensors: MergedTensors) -> bool:
    """Check whether each tensor of the model is one of the files: of some families, they are converted on loading."""
    return not getattr(model, "_weight_conversions", None) and not getattr(model, "hf_quantizer", None) and all(
        tensors.has(name) for name, _ in model.named_parameters())


def release_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Free the weights, and keep their shapes in this dtype; tied weights stay tied."""
    empty = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                empty.setdefault(id(parameter), nn.Parameter(
                    torch.empty_like(parameter, device="meta", dtype=dtype), requires_grad=False))
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = empty[id(parameter)]


def write_shards(model: PreTrainedModel, tensors: MergedTensors, out: Path, max_shard_bytes: int) -> None:
    """Write config and weights as `save_pretrained` does; model: the structure alone, in the dtype of the files."""
    dtype = model.dtype
    model.config.dtype, model.config.architectures = str(dtype).split(".")[1], [type(model).__name__]
    model.config.save_pretrained(out)
    add_rope_of_transformers_4(out)
    if model.can_generate():
        model.generation_config.save_pretrained(out)
    parameters = sorted(model.named_parameters(), key=lambda item: dot_natural_key(item[0]))
    split = split_torch_state_dict_into_shards(
        {name: parameter.data for name, parameter in parameters}, filename_pattern=FILE_PATTERN,
        max_shard_size=max_shard_bytes)
    for file, names in split.filename_to_tensors.items():
        save_file({name: tensors.merge(name).to(dtype).contiguous() for name in names}, out / file,
                  metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": {"total_parameters": model.num_parameters(), **split.metadata},
                 "weight_map": split.tensor_to_filename}
        write_text(out / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")


def _tensor_names(file: Path) -> list[str]:
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())
