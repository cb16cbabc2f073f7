"""Read differences between model families from the libraries or the model itself, without a table of names.

Tested: LLaMA (2 and 3), Mistral, Qwen 2 and 3, Gemma 2 and 3 (text), OLMo 2, SmolLM 3, Phi, GPT-2, GPT-J, GPT-NeoX
(Pythia), OPT; as policies, Granite and Cohere. Families that cannot work raise ValueError.
"""

import inspect

import torch
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model under the head, which computes the last hidden states."""
    return model.get_decoder()


def hidden_size(model: PreTrainedModel) -> int:
    """Return the width of the last hidden states; OPT-350m projects them to another than its layers have."""
    return model.get_output_embeddings().in_features


def caps_attention(config: PretrainedConfig) -> bool:
    """Check whether the family caps its attention scores, as Gemma 2 does; the CPU kernels do not."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def check_text_only(config: PretrainedConfig) -> None:
    """Raise ValueError for a model of images or sounds too, in which an adapter's targets may be layers of those."""
    if config.get_text_config() is not config:
        raise ValueError(f"{config.model_type} models read more than text: give a model of text alone "
                         f"(of Gemma 3, those of 270M and 1B parameters)")


def check_positions(model: PreTrainedModel) -> None:
    """Make a loaded model raise ValueError for positions that it does not have, and check that it can attend at all."""
    inner, family = backbone(model), model.config.model_type
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(f"{family} models take no position ids, which this project's batches need")
    inner.register_forward_pre_hook(_check_position_ids, with_kwargs=True)
    with torch.no_grad():  # attention.attend raises for unsupported families: now, not after an hour
        inner(input_ids=torch.zeros(1, 2, dtype=torch.long, device=inner.device), use_cache=False)


def check_length(config: PretrainedConfig, tokens: int) -> None:
    """Raise ValueError if a text is longer than a model's table of learnt positions (GPT-2, OPT).

    A GPU would end the process with a device-side assertion. Rotary positions are computed, so any length works.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and getattr(config, "rope_parameters", None) is None and tokens > limit:
        raise ValueError(
            f"a text of {tokens} tokens, but this {config.model_type} has a table of {limit} positions: "
            f"lower the recipe's lengths (prompt and response together)"
        )


def first_layers(config: PretrainedConfig, layers: int | None) -> dict:
    """Return the arguments of `from_pretrained` that load only the first layers of a model; None: all of them.

    Raises ValueError if the model has fewer.
    """
    if layers is None:
        return {}
    if layers > config.num_hidden_layers:
        raise ValueError(f"the first {layers} layers are wanted of a {config.model_type} model that has "
                         f"{config.num_hidden_layers}: lower the recipe's number of layers")
    types = getattr(config, "layer_types", None)
    return {"num_hidden_layers": layers} | ({"layer_types": types[:layers]} if types else {})


def check_lora_targets(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    """Raise ValueError if PEFT has no default targets for the family, or if no layer has one of the names."""
    family = model.config.model_type
    matrices = ", ".join(sorted({name.split(".")[-1] for name, module in backbone(model).named_modules()
                                 if isinstance(module, nn.Linear | Conv1D)}))
    if not names and family not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise ValueError(f"PEFT knows no LoRA targets for {family}: set lora.target_modules to some of {matrices}")
    layers = [f".{name}" for name, _ in model.named_modules()]
    unknown = [name for name in names if not any(layer.endswith(f".{name}") for layer in layers)]
    if unknown:
        raise ValueError(f"lora.target_modules: {family} has no {', '.join(unknown)}; it has {matrices}")


def _check_position_ids(inner: nn.Module, args: tuple, kwargs: dict) -> None:
    position_ids = kwargs.get("position_ids")
    if position_ids is not None and getattr(inner.config, "rope_parameters", None) is None:
        check_length(inner.config, int(position_ids.max()) + 1)


def max_positions(*folders) -> int:
    """Return the number of positions that all of these models have."""
    configs = map(AutoConfig.from_pretrained, folders)
    return min(getattr(config, "max_position_embeddings", None) or 2**31 for config in configs)
