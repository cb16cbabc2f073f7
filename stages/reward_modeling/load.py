"""Load reward models from folders: alone, in a merge (modeling.merging), and as adapters on a base in memory.

An adapter shares its base with the policy, so that the base is in memory once.
"""

from copy import deepcopy
from pathlib import Path

import numpy as np
import torch
from peft import PeftConfig, PeftModel, TaskType, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForSequenceClassification, PreTrainedModel

from stages.modeling.adapters import HEAD, active_adapter, adapter_parameters, is_reward_model, load_score_head
from stages.modeling.families import backbone
from stages.modeling.load import load_pretrained
from stages.modeling.lora import unwrap_peft
from stages.modeling.merging.merge import CausalTarget
from stages.modeling.pretrained import ADAPTER_WEIGHTS
from stages.modeling.tokenizer import load_tokenizer
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.scorer import Scorer
from stages.reward_modeling.scoring_file import SCORING, apply_scoring, load_scoring, member_folders, save_scoring


def load_classifier(
    folder: Path | str, precision: str = "fp32", new_head: bool = False, cpu_kernels: str = "off",
    layers: int | None = None
) -> PreTrainedModel:
    """Load a sequence classifier with one output, in eval mode; ValueError if a weight, such as the head, is missing.

    new_head: `folder` is a causal model, and its head is still to be initialised (reward_model.initialise_head).
    layers: load only the first ones; None: all.
    """
    if not new_head and (Path(folder) / SCORING).is_file():
        load_scoring(Path(folder))
    return load_pretrained(
        AutoModelForSequenceClassification, folder, precision, cpu_kernels, layers=layers, num_labels=1,
        optional_weights=("score.weight",) if new_head else ())


def load_reward_models(
    reward: Path, precision: str, batch_rows: int = 64, cpu_kernels: str = "off", share_prompts: bool = False
) -> list[Scorer]:
    """Load every model of a merged reward artifact; share_prompts: see Scorer."""
    return [Scorer(load_classifier(folder, precision, cpu_kernels=cpu_kernels), precision, batch_rows=batch_rows,
                   share_prompts=share_prompts) for folder in member_folders(reward)]


def select_target(adapter: Path, examples: list[Example], cpu_kernels: str, precision: str) -> CausalTarget:
    """Return the target for the last artifact of a merge, a reward model or a language model."""
    return (RewardTarget if is_reward_model(adapter) else CausalTarget)(examples, cpu_kernels, precision)


class RewardTarget(CausalTarget):
    """How a merge loads and evaluates a reward model."""

    def load(self, folder: Path) -> PreTrainedModel:
        return load_classifier(folder, self.precision, cpu_kernels=self.cpu_kernels)

    def prepare(self, model: PreTrainedModel | None, base: Path, adapter: Path) -> PreTrainedModel:
        load_score_head(adapter)  # fails, without one, before anything is loaded
        scorer = load_classifier(base, self.precision, new_head=True, cpu_kernels=self.cpu_kernels)
        if model is not None:
            backbone(scorer).load_state_dict(backbone(model).state_dict(), assign=True)  # no copy of the weights
        # Only an id that the embedding has: most families could not be loaded with another one.
        pad = load_tokenizer(adapter).pad_token_id
        scorer.config.pad_token_id = pad if pad < scorer.get_input_embeddings().num_embeddings else None
        apply_scoring(adapter, scorer)
        return scorer

    def evaluate(self, model) -> dict[str, float]:
        """Compute the share of pairs whose better answer scores higher; ties count one half."""
        texts = [(example.prompt, answer) for example in self.examples for answer in example.answers]
        scores = Scorer(model, self.precision)(*map(list, zip(*texts, strict=True))).double().numpy()
        better, worse = (scores[indices] for indices in pair_indices(self.examples))
        return {"pair_accuracy": float(np.mean((np.sign(better - worse) + 1) / 2))}  # NaN, and refused, if a score is

    def save_settings(self, adapter: Path, out: Path, model: PreTrainedModel) -> None:
        """Write scoring.json and the settings in the model's config."""
        save_scoring(out, apply_scoring(adapter, model))


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
