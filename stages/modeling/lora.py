"""TODO docstring."""

from collections.abc import Sequence

from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from stages.modeling.families import check_targets
from stages.modeling.load import QUANTISED


def unwrap_peft(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """The model itself, under its adapters if it has any."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapted_layers(model: PreTrainedModel | PeftModel) -> list[LoraLayer]:
    """The layers that carry an adapter."""
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def add_lora(
    model: PreTrainedModel,
    *,
    r: int,
    alpha: int,
    dropout: float,
    target_modules: tuple[str, ...],
    precision: str,
    scorer: bool = False,
    new_tokens: Sequence[int] = (),
) -> PeftModel:
    """A fresh adapter on a frozen base; only it (and a scorer's head) requires gradients.

    target_modules: names of layers; none: those that PEFT knows for the family. new_tokens: ids whose rows in the
    embeddings and in the output layer learn as well.
    """
    check_targets(model, target_modules)
    if precision in QUANTISED:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS if scorer else TaskType.CAUSAL_LM,
        r=r,
        lora_alpha=alpha,
        lora_dropout=dropout,
        bias="none",
        target_modules=list(target_modules) or None,
        modules_to_save=["score"] if scorer else None,
        trainable_token_indices={name: list(new_tokens) for name in _vocabularies(model)} if new_tokens else None,
    )
    return get_peft_model(model, config)


def _vocabularies(model: PreTrainedModel) -> list[str]:
    """Last names of the layers with a row for each token."""
    layers = (model.get_input_embeddings(), model.get_output_embeddings())
    return [name.split(".")[-1] for name, module in model.named_modules() if module in layers]
