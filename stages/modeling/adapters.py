"""Switch adapters on one base: policy, value function and reward model share frozen weights that are in memory once.

The base without an active adapter is the reference model. A reward adapter (from stages.reward, unmerged) can be one of
the adapters, with its score head.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, TaskType
from safetensors import safe_open
from torch import nn

from stages.artifacts import artifact
from stages.distributed import sharding
from stages.model_files.loadable import ADAPTER_CONFIG
from stages.modeling.lora import adapted_layers, unwrap_peft
from stages.modeling.pretrained import ADAPTER_WEIGHTS
from stages.runtime.files import read_json_object

POLICY, VALUE = "default", "value"  # adapter names; "default" is PEFT's
HEAD = "score.weight"


@contextmanager
def active_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Make one adapter the only active one, or none (the bare base); a model without adapters stays as it is.

    Unlike PEFT's own switches, this leaves requires_grad unchanged.
    """
    layers = adapted_layers(model)
    previous = [layer.active_adapters for layer in layers]
    _activate(layers, [[] if name is None else [name]] * len(layers))
    try:
        yield
    finally:
        _activate(layers, previous)


@contextmanager
def merged_adapter(model: nn.Module, precision: str) -> Iterator[nn.Module]:
    """Yield the model with its adapter POLICY as one without an adapter, and restore the exact weights afterwards.

    Merges only in fp32: a sum rounded to fewer bits would differ from the update's forward pass, in which base and
    adapter are separate. Weights that are sharded are not merged, either; a model without adapters stays as it is.
    """
    exact = precision == "fp32" and not sharding.has_shards(model)
    layers = [layer for layer in adapted_layers(model) if exact and POLICY in layer.scaling]
    base_weights = [layer.get_base_layer().weight.data for layer in layers]
    if not layers:
        yield model
        return
    try:
        with torch.no_grad():
            for layer, weight in zip(layers, base_weights, strict=True):
                layer.get_base_layer().weight.data = weight + layer.get_delta_weight(POLICY).to(weight)
        with active_adapter(model, None):
            yield unwrap_peft(model)
    finally:
        for layer, weight in zip(layers, base_weights, strict=True):
            layer.get_base_layer().weight.data = weight


def adapter_name(tensor_name: str) -> str | None:
    """Return the adapter that a tensor belongs to: "default" for ...lora_A.default.weight, None outside adapters."""
    return tensor_name.split(".lora_")[1].split(".")[1] if ".lora_" in tensor_name else None


def adapter_parameters(model: nn.Module, adapter: str) -> dict[str, nn.Parameter]:
    """Return one adapter's parameters by name."""
    return {name: p for name, p in model.named_parameters() if adapter_name(name) == adapter}


def is_adapter(folder: Path) -> bool:
    """Check whether the artifact is an adapter, not a whole model."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_reward_adapter(folder: Path) -> bool:
    """Check whether the artifact is an adapter with a score head, according to its configuration."""
    return is_adapter(folder) and PeftConfig.from_pretrained(folder).task_type == TaskType.SEQ_CLS


def is_reward_model(folder: Path) -> bool:
    """Check whether the artifact is a reward model: an adapter with a score head, or a whole sequence classifier."""
    if is_adapter(folder):
        return is_reward_adapter(folder)
    architectures = (read_json_object(folder / "config.json") or {}).get("architectures")
    return bool(architectures) and architectures[0].endswith("ForSequenceClassification")


def check_base(adapter: Path, base: Path) -> None:
    """Raise ValueError unless `adapter` was trained on the weights in `base`.

    The adapter's manifest names them or, without one, PEFT's configuration.
    """
    if (adapter / artifact.MANIFEST).is_file():
        inputs = artifact.read_manifest(adapter)["inputs"]
        source = inputs.get("base") or inputs.get("policy") or {"path": "something else", "sha256": None}
        path, trained_on = source["path"], source["sha256"]
    else:
        path = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        trained_on = artifact.digest(path) if Path(path).exists() else None
    if trained_on != artifact.digest(base):
        raise ValueError(f"the adapter {adapter} was trained on {path}, and not on {base}: give the base that it was "
                         f"trained on (to ppo, the merged reward model will do as well)")


def load_score_head(adapter: Path) -> torch.Tensor:
    """Load the trained score head [1, D]; ValueError without one, because a random head gives random scores."""
    with safe_open(adapter / ADAPTER_WEIGHTS, "pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith(HEAD)]  # noqa: SIM118 (not a dict)
        if len(names) != 1:
            raise ValueError(f"{adapter} holds no score head: this reward adapter cannot be used")
        return tensors.get_tensor(names[0])


def _activate(layers: list, names: list[list[str]]) -> None:
    for layer, active in zip(layers, names, strict=True):
        if layer.active_adapters != active:
            required = [(p, p.requires_grad) for p in layer.parameters()]
            layer.set_adapter(active)
            for parameter, flag in required:
                parameter.requires_grad_(flag)
