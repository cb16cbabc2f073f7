"""Add LoRA adapters (arXiv 2106.09685) with PEFT."""

from peft import LoraConfig, PeftModel, TaskType, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraLayer
from transformers import PreTrainedModel

from stages.modeling.cpu_kernels.linear import replace_lora_layers
from stages.modeling.families import check_lora_targets
from stages.modeling.load import QUANTISED
from stages.modeling.packed.forward import uses_cpu_kernels


def unwrap_peft(model: PreTrainedModel | PeftModel) -> PreTrainedModel:
    """Return the model without PEFT's wrapper."""
    return model.get_base_model() if isinstance(model, PeftModel) else model


def adapted_layers(model: PreTrainedModel | PeftModel) -> list[LoraLayer]:
    """List the layers that have an adapter."""
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
) -> PeftModel:
    """Freeze the model and add an untrained adapter, which alone requires gradients (with a scorer's head).

    Args:
        target_modules: names of layers; empty: PEFT's defaults for the family.
        scorer: whether the model is a sequence classifier.
    """
    check_lora_targets(model, target_modules)
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
    )
    model = get_peft_model(model, config)
    if scorer and precision == "bf16":
        unwrap_peft(model).score.modules_to_save.float()  # as PEFT does with adapters: bf16 would round updates away
    if uses_cpu_kernels(unwrap_peft(model)):
        replace_lora_layers(model)
    return model
