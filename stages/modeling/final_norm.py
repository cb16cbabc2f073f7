"""Divide a model's logits by a temperature for good: scale its final norm, from which the output layer computes them.

The output layer itself may be the embedding, too.
"""

from copy import deepcopy

import torch
from torch import nn
from transformers import PreTrainedModel

from stages.modeling.families import backbone
from stages.modeling.output_layer import output_layer, probe_inputs


@torch.no_grad()
def check_divisible(model: PreTrainedModel) -> None:
    """Raise ValueError if scaling a causal model's final norm does not divide its logits.

    It does not where the output layer has a bias, where logits are capped, and where there is no final norm.
    """
    layer, norm, inputs = output_layer(model), find_final_norm(model), []
    if norm is not None:
        hook = norm.register_forward_hook(lambda module, arguments, output: inputs.append(arguments[0]))
        expected = model(**probe_inputs(model)).logits / 2
        hook.remove()
        logits = layer(_divide(norm, 2.0).to(inputs[-1].dtype)(inputs[-1]))
        if (logits - expected).abs().max() <= 8 * torch.finfo(logits.dtype).eps * expected.abs().max():
            return
    raise ValueError(f"final_temperatures: scaling the norm after the last layer of {model.config.model_type} does not "
                     f"divide its logits: set it to []")


def divide_final_norm(model: PreTrainedModel, temperature: float) -> dict[str, torch.Tensor]:
    """Return, by name and in fp32, the parameters of the final norm with which the logits are divided by `temperature`.
    """
    norm = find_final_norm(model)
    path = next(name for name, module in model.named_modules() if module is norm)
    return {f"{path}.{name}": p.detach() for name, p in _divide(norm, temperature).named_parameters()}


def find_final_norm(model: PreTrainedModel) -> nn.Module | None:
    """Return the norm after the last layer; None if the family has none."""
    children = [(module, list(module.parameters())) for module in backbone(model).children()]
    norms = [module for module, weights in children if weights and all(weight.dim() == 1 for weight in weights)]
    return norms[-1] if norms else None


@torch.no_grad()
def _divide(norm: nn.Module, temperature: float) -> nn.Module:
    """Copy a norm in fp32, with its output divided by `temperature`.

    Its output is (weight + c) * x + bias: c is 1 in Gemma, else 0, and is what the output has at weight 0.
    """
    divided = deepcopy(norm).float()
    hidden = torch.linspace(-1, 1, len(divided.weight)).to(divided.weight)
    zero = {name: torch.zeros_like(p) for name, p in divided.named_parameters()}
    at_0 = torch.func.functional_call(divided, zero, hidden)
    at_1 = torch.func.functional_call(divided, zero | {"weight": torch.ones_like(divided.weight)}, hidden)
    c = round(float(at_0.norm() / (at_1 - at_0).norm()))
    divided.weight.add_(c).div_(temperature).sub_(c)
    if getattr(divided, "bias", None) is not None:
        divided.bias.div_(temperature)
    return divided
