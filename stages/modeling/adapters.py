"""Roles on one base: policy, value function and reward are adapters of their own on the same frozen weights, which are
in memory once; the base with none of them on is the reference.

A reward adapter (what stages.reward makes, before it is merged) can become a role here, with the score head it holds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft import PeftConfig, TaskType
from safetensors import safe_open
from torch import nn

from stages.modeling.lora import adapted_layers
from stages.modeling.pretrained import WEIGHTS
from stages.runtime import artifact

POLICY, VALUE = "default", "value"  # names of adapters; the first is PEFT's own
CONFIG = "adapter_config.json"
HEAD = "score.weight"


@contextmanager
def active_adapter(model: nn.Module, role: str | None) -> Iterator[None]:
    """Forward passes in here go through this adapter alone; None: through the bare base.

    A model without adapters is what it is. What requires gradients goes on requiring them (PEFT's own switches freeze
    what they turn off).
    """
    layers = adapted_layers(model)
    before = [layer.active_adapters for layer in layers]
    _activate(layers, [[] if role is None else [role]] * len(layers))
    try:
        yield
    finally:
        _activate(layers, before)


def adapter_name(name: str) -> str | None:
    """The adapter that a tensor of this name belongs to: "default" of ...lora_A.default.weight."""
    return name.split(".lora_")[1].split(".")[1] if ".lora_" in name else None


def adapter_parameters(model: nn.Module, role: str) -> dict[str, nn.Parameter]:
    """Name to parameter of one adapter."""
    return {name: p for name, p in model.named_parameters() if adapter_name(name) == role}


def is_adapter(folder: Path) -> bool:
    """Whether the artifact is an adapter, and not a whole model."""
    return (folder / CONFIG).is_file()


def is_reward_adapter(folder: Path) -> bool:
    """Whether the artifact is an adapter with a score head, as its configuration says."""
    return is_adapter(folder) and PeftConfig.from_pretrained(folder).task_type == TaskType.SEQ_CLS


def check_base(adapter: Path, base: Path) -> None:
    """ValueError unless `adapter` was trained on the very weights in `base`, as its manifest says (or, if it has none,
    as PEFT's configuration does).
    """
    if (adapter / artifact.MANIFEST).is_file():
        inputs = artifact.read_manifest(adapter)["inputs"]
        found = inputs.get("base") or inputs.get("policy") or {"path": "something else", "sha256": None}
        path, trained_on = found["path"], found["sha256"]
    else:
        path = json.loads((adapter / CONFIG).read_text(encoding="utf-8"))["base_model_name_or_path"]
        trained_on = artifact.digest(path) if Path(path).exists() else None
    if trained_on != artifact.digest(base):
        raise ValueError(f"the adapter {adapter} was trained on {path}, and not on {base}: give the base that it was "
                         f"trained on (to ppo, the merged reward model will do as well)")


def load_score_head(adapter: Path) -> torch.Tensor:
    """The trained score head as saved, [1, D]; ValueError without one, for a random head would score at random."""
    with safe_open(adapter / WEIGHTS, "pt") as tensors:
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
