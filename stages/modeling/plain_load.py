"""Check at the start of training that the model computes what its folder holds, as a plain load computes it.

A wrong base, a lost adapter or a faulty layer would train all the same. The plain model is loaded first and freed, so
that memory holds one model at a time.

Shapes: B rows, T tokens, D hidden size, V vocabulary.
"""

import gc
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from stages.modeling.families import backbone, first_layers
from stages.modeling.load import device, precision_arguments
from stages.modeling.lora import unwrap_peft
from stages.modeling.merging.checks import probe_ids
from stages.modeling.output_layer import output_layer
from stages.modeling.q_heads import has_q_heads

# Largest relative difference (2-norm). Measured on the bundled site's SFT model: 1e-6, bf16 0.013, int8 0.04, nf4 0.016
# from rounding (quantised models are trained with norms in fp32); 0.39 between it and its base.
LIMITS = {"fp32": 1e-3, "mixed": 1e-3, "bf16": 0.2, "int8": 0.2, "nf4": 0.2}


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
        **first_layers(AutoConfig.from_pretrained(folder), layers)).eval()
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
    if not hasattr(unwrap_peft(model), "score"):
        logits = _logits(model, states)[..., :plain.logits.shape[-1]]  # rows of new tokens come last
        difference = max(difference, _relative_difference(logits, plain.logits))
    limit = LIMITS[plain.precision]
    if not difference <= limit:
        raise ValueError(f"what would be trained is not {plain.folder}: its outputs differ by {difference:.2g} from "
                         f"those of a plain load (limit {limit:g}); is the folder whole, and made by this version?")
    return f"the model in {plain.folder}  differs by {difference:.2g} from a plain load  (limit {limit:g})  ok"


@torch.no_grad()
def _hidden_states(model, ids: torch.Tensor) -> torch.Tensor:
    ids = ids.to(model.device)
    inner = backbone(unwrap_peft(model))
    return inner(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).last_hidden_state


@torch.no_grad()
def _logits(model, states: torch.Tensor) -> torch.Tensor:
    head = output_layer(model)
    return head(states.to(head.weight.dtype)).float().cpu()


def _relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm().clamp(min=1e-9))
