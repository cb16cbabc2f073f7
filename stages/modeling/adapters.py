"""Roles on one base: policy, value function and reward are adapters of their own on the same frozen weights, which are
in memory once; the base with none of them on is the reference.

A reward adapter (what stages.reward makes, before it is merged) can become a role here, with the score head it holds.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, TaskType, get_peft_model, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from stages.learning.reward_model import Scorer, put_scoring
from stages.modeling.families import backbone
from stages.modeling.lora import adapted_layers, unwrap_peft
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


def role_of(name: str) -> str | None:
    """The adapter that a tensor of this name belongs to: "default" of ...lora_A.default.weight."""
    return name.split(".lora_")[1].split(".")[1] if ".lora_" in name else None


def parameters_of(model: nn.Module, role: str) -> dict[str, nn.Parameter]:
    """Name to parameter of one adapter."""
    return {name: p for name, p in model.named_parameters() if role_of(name) == role}


def is_adapter(folder: Path) -> bool:
    """Whether the artifact is an adapter, and not a whole model."""
    return (folder / CONFIG).is_file()


def is_scorer(folder: Path) -> bool:
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


def saved_head(adapter: Path) -> torch.Tensor:
    """The trained score head as saved, [1, D]; ValueError without one, for a random head would score at random."""
    with safe_open(adapter / WEIGHTS, "pt") as tensors:
        names = [name for name in tensors.keys() if name.endswith(HEAD)]  # noqa: SIM118 (not a dict)
        if len(names) != 1:
            raise ValueError(f"{adapter} holds no score head: this reward adapter cannot be used")
        return tensors.get_tensor(names[0])


def add_role(model: nn.Module, folder: Path, role: str, learns: bool) -> tuple[PeftModel, torch.Tensor]:
    """Put the reward adapter in `folder` on a causal model under the name `role`; its score head [1, D] comes back too.

    ValueError where it does not fit, or has no head. The roles that are there stay as they are.
    """
    head = saved_head(folder)
    tensors = {name: t for name, t in load_file(folder / WEIGHTS).items() if not name.endswith(HEAD)}
    config = PeftConfig.from_pretrained(folder)
    config.task_type, config.modules_to_save, config.inference_mode = TaskType.CAUSAL_LM, None, False
    config.lora_dropout = 0.0  # the scores, and old and new values, must come from one function
    required = [(p, p.requires_grad) for p in model.parameters()]
    if isinstance(model, PeftModel):
        model.add_adapter(role, config)
    else:
        model = get_peft_model(model, config, adapter_name=role)
    try:
        unexpected = set_peft_model_state_dict(model, tensors, adapter_name=role).unexpected_keys
    except RuntimeError:  # another shape
        unexpected = list(tensors)
    if unexpected or len(parameters_of(model, role)) != len(tensors):
        raise ValueError(f"{folder} does not fit this {unwrap_peft(model).config.model_type}: "
                         f"{len(tensors)} tensors, {len(parameters_of(model, role))} places")
    for parameter, flag in [*required, *((p, learns) for p in parameters_of(model, role).values())]:
        parameter.requires_grad_(flag)
    return model.eval(), head


class RewardRole(nn.Module):
    """A reward adapter on a base that other roles share, in the shape of the classifier that it was trained as.

    role: the adapter's name there; each member of an ensemble has its own.
    """

    base_model_prefix = "model"

    def __init__(self, model: nn.Module, folder: Path, role: str):
        super().__init__()
        self.role = role
        self.model, head = add_role(model, folder, role, learns=False)
        self.score = nn.Linear(head.shape[1], 1, bias=False, device=self.device, dtype=head.dtype)
        self.score.weight = nn.Parameter(head.to(self.device), requires_grad=False)
        self.config = deepcopy(unwrap_peft(self.model).config)
        put_scoring(folder, self)
        self.eval()

    @property
    def device(self) -> torch.device:
        return unwrap_peft(self.model).device

    def get_decoder(self) -> nn.Module:
        return backbone(unwrap_peft(self.model))

    def get_input_embeddings(self) -> nn.Module:
        return unwrap_peft(self.model).get_input_embeddings()


class SharedScorer(Scorer):
    """Prompts and answers to rewards, under the reward adapter of a shared base."""

    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """As Scorer's: rewards [B] fp32 on the CPU."""
        with active_adapter(self.model.model, self.model.role):
            return super().__call__(prompts, answers)


def _activate(layers: list, names: list[list[str]]) -> None:
    for layer, active in zip(layers, names, strict=True):
        if layer.active_adapters != active:
            required = [(p, p.requires_grad) for p in layer.parameters()]
            layer.set_adapter(active)
            for parameter, flag in required:
                parameter.requires_grad_(flag)
