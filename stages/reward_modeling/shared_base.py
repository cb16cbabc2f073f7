"""Score with a reward adapter on a base that it shares with the policy, so that the base is in memory once."""

from copy import deepcopy
from pathlib import Path

import torch
from peft import PeftConfig, PeftModel, TaskType, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn

from stages.modeling.adapters import HEAD, active_adapter, adapter_parameters, load_score_head
from stages.modeling.families import backbone
from stages.modeling.lora import unwrap_peft
from stages.modeling.pretrained import ADAPTER_WEIGHTS
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import apply_scoring


def add_reward_adapter(model: nn.Module, folder: Path, role: str, learns: bool) -> tuple[PeftModel, torch.Tensor]:
    """Load the reward adapter in `folder` onto a causal model under the name `role`; return model and head [1, D].

    Adapters that are there already stay as they are. Raises ValueError if it does not fit the model or has no head.
    """
    head = load_score_head(folder)
    tensors = {name: t for name, t in load_file(folder / ADAPTER_WEIGHTS).items() if not name.endswith(HEAD)}
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
    if unexpected or len(adapter_parameters(model, role)) != len(tensors):
        raise ValueError(f"{folder} does not fit this {unwrap_peft(model).config.model_type}: "
                         f"{len(tensors)} tensors, but the model takes {len(adapter_parameters(model, role))}")
    for parameter, flag in [*required, *((p, learns) for p in adapter_parameters(model, role).values())]:
        parameter.requires_grad_(flag)
    return model.eval(), head


class RewardAdapter(nn.Module):
    """A reward adapter on a shared base, with the interface of the sequence classifier that it was trained as.

    role: unique name of the adapter on the base.
    """

    base_model_prefix = "model"

    def __init__(self, model: nn.Module, folder: Path, role: str):
        super().__init__()
        self.role = role
        self.model, head = add_reward_adapter(model, folder, role, learns=False)
        self.score = nn.Linear(head.shape[1], 1, bias=False, device=self.device, dtype=head.dtype)
        self.score.weight = nn.Parameter(head.to(self.device), requires_grad=False)
        self.config = deepcopy(unwrap_peft(self.model).config)
        apply_scoring(folder, self)
        self.eval()

    @property
    def device(self) -> torch.device:
        return unwrap_peft(self.model).device

    def get_decoder(self) -> nn.Module:
        return backbone(unwrap_peft(self.model))

    def get_input_embeddings(self) -> nn.Module:
        return unwrap_peft(self.model).get_input_embeddings()


class SharedScorer(Scorer):
    """Compute rewards with a reward adapter on a shared base."""

    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Compute rewards [B], fp32 on the CPU."""
        with active_adapter(self.model.model, self.model.role):
            return super().__call__(prompts, answers)
