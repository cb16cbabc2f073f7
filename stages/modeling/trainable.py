"""Load the causal model that a stage trains: an untrained adapter on it, or all its weights.

A wrong base, a lost adapter or a faulty layer would train all the same: the model is compared with what a plain load of
its folder computes. The plain model is loaded first and freed, so that memory holds one model at a time.

Shapes: B rows, T tokens, D hidden size, V vocabulary.
"""

import gc
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stages.distributed import sharding
from stages.modeling import families, lora
from stages.modeling.load import device, load_causal, precision_arguments
from stages.modeling.merging.checks import probe_ids
from stages.modeling.output_layer import output_layer
from stages.modeling.q_heads import has_q_heads
from stages.modeling.tokenizer import check_special_tokens, check_vocabulary
from stages.runtime.stage_lines import print_line

# Largest relative difference (2-norm). Measured on the bundled site's SFT model: 1e-6, bf16 0.013, int8 0.04, nf4 0.016
# from rounding (quantised models are trained with norms in fp32); 0.39 between it and its base.
LIMITS = {"fp32": 1e-3, "mixed": 1e-3, "bf16": 0.2, "int8": 0.2, "nf4": 0.2}


@dataclass(frozen=True)
class TrainableSettings:
    """Settings of the model, named as in the recipe; lora: a dataclass with the adapter's settings."""

    lora: object
    tune: str
    precision: str
    cpu_kernels: str
    seed: int
    sharding: str


def load_trainable_causal(
    settings: TrainableSettings, folder: Path, tokenizer, *, max_length_tokens: int, stage: str
) -> PreTrainedModel:
    """Load a model with an untrained adapter, or with all weights requiring gradients.

    Raises ValueError if the tokenizer does not fit the model, if it has no positions for `max_length_tokens`, or if it
    computes something else than a plain load of `folder`.
    """
    plain = plain_outputs(folder, settings.precision)
    torch.manual_seed(settings.seed)
    model = load_causal(folder, settings.precision, settings.cpu_kernels)
    check_special_tokens(tokenizer, model.config)
    families.check_length(model.config, max_length_tokens)
    check_vocabulary(tokenizer, model)
    if settings.tune == "full":
        model.requires_grad_(True)
    else:
        model = lora.add_lora(model, precision=settings.precision, **vars(settings.lora))
    shard_layers(model, settings.sharding)
    print_line(f"{stage}: check  {check_trained_model(model, plain)}")
    return model.eval()


def shard_layers(model: PreTrainedModel, setting: str) -> None:
    """Split the weights of the layers over the processes if the recipe's `sharding` is fsdp."""
    if setting == "fsdp":
        sharding.shard(families.backbone(lora.unwrap_peft(model)))


class PlainOutputs(NamedTuple):
    """What a plain load of `folder` computes for the probe's token ids [B, T]: states [B, T, D], logits [B, T, V]."""

    folder: Path
    precision: str
    ids: torch.Tensor
    states: torch.Tensor
    logits: torch.Tensor


def plain_outputs(folder: Path, precision: str, layers: int | None = None) -> PlainOutputs:
    """Load a causal model as Transformers alone does, and compute the probe's last hidden states and logits.

    layers: load only the first ones; None: all.

    Raises ValueError for a folder with Q heads: what is trained from it would be merged into a model without them.
    """
    if has_q_heads(folder):
        raise ValueError(f"{folder} is a policy with Q heads, made by ilql, which nothing can be trained from: give "
                         f"the model that ilql started from")
    model = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": device()}, use_safetensors=True, **precision_arguments(precision),
        **families.first_layers(AutoConfig.from_pretrained(folder), layers)).eval()
    ids = probe_ids(model.config.vocab_size)
    states = _hidden_states(model, ids)
    outputs = PlainOutputs(folder, precision, ids, states.float().cpu(), _logits(model, states))
    del model
    gc.collect()  # it may be in a cycle, and the model that is trained comes next
    return outputs


def check_trained_model(model: PreTrainedModel, plain: PlainOutputs) -> str:
    """Describe how the model that is to be trained, with its fresh adapter, differs from a plain load of its folder.

    Raises ValueError if it is by more than rounding. Of a classifier, only the hidden states are compared.
    """
    states = _hidden_states(model, plain.ids)
    difference = _relative_difference(states.float().cpu(), plain.states)
    if not hasattr(lora.unwrap_peft(model), "score"):
        difference = max(difference, _relative_difference(_logits(model, states), plain.logits))
    limit = LIMITS[plain.precision]
    if not difference <= limit:
        raise ValueError(f"what would be trained is not {plain.folder}: its outputs differ by {difference:.2g} from "
                         f"those of a plain load (limit {limit:g}); is the folder whole, and made by this version?")
    return f"the model in {plain.folder}  differs by {difference:.2g} from a plain load  (limit {limit:g})  ok"


@torch.no_grad()
def _hidden_states(model, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    inner = families.backbone(lora.unwrap_peft(model))
    return inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state


@torch.no_grad()
def _logits(model, states: torch.Tensor) -> torch.Tensor:
    head = output_layer(model)
    return head(states.to(head.weight.dtype)).float().cpu()


def _relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-9))
