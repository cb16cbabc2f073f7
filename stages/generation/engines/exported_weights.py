"""Write a policy's weights as a model without adapters, for an engine that loads a folder."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from stages.modeling.adapters import POLICY
from stages.modeling.lora import LoraLayer, unwrap_peft

WEIGHTS = "model.safetensors"


def export_weights(model, folder: Path) -> None:
    """Write config.json and model.safetensors of the policy's model, with its adapter merged, in the base's dtype."""
    inner = unwrap_peft(model)
    inner.config.save_pretrained(folder)
    save_file(merged_weights(inner), folder / WEIGHTS, metadata={"format": "pt"})


@torch.no_grad()
def merged_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return the weights by their names without adapters, with POLICY added where it is active; tied ones once."""
    weights = {name.replace(".base_layer.", "."): tensor for name, tensor in model.state_dict().items()
               if ".lora_" not in name}
    for path, layer in model.named_modules():
        if isinstance(layer, LoraLayer) and POLICY in layer.active_adapters:
            name = f"{path}.weight"
            weights[name] = weights[name] + layer.get_delta_weight(POLICY).to(weights[name])
    distinct = {tensor.data_ptr(): name for name, tensor in reversed(weights.items())}
    return {name: weights[name].contiguous() for name in weights if name in distinct.values()}
