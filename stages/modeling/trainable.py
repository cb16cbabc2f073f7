"""Load the causal model that a stage trains: an untrained adapter on it, or all its weights."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from stages.distributed import sharding
from stages.modeling import families, lora
from stages.modeling.load import load_causal
from stages.modeling.plain_load import check_trained_model, plain_outputs
from stages.modeling.tokenizer import check_special_tokens, check_vocabulary, resize_token_embeddings
from stages.runtime.stage_lines import print_line


@dataclass(frozen=True)
class TrainableSettings:
    """Settings of the model, named as in the recipe; lora: a dataclass with the adapter's settings."""

    lora: object
    tune: str
    precision: str
    cpu_kernels: str
    seed: int
    sharding: str
    train_new_tokens: bool


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
    new_tokens = resize_token_embeddings(model, tokenizer) if settings.train_new_tokens else []
    check_vocabulary(tokenizer, model)
    if settings.tune == "full":
        model.requires_grad_(True)
    else:
        model = lora.add_lora(
            model, precision=settings.precision, new_tokens=new_tokens, **vars(settings.lora))
    shard_layers(model, settings.sharding)
    print_line(f"{stage}: check  {check_trained_model(model, plain)}")
    return model.eval()


def shard_layers(model: PreTrainedModel, setting: str) -> None:
    """Split the weights of the layers over the processes if the recipe's `sharding` is fsdp."""
    if setting == "fsdp":
        sharding.shard(families.backbone(lora.unwrap_peft(model)))
