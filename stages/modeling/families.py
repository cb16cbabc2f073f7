"""What model families do differently, asked of the library or of the model itself: no table of names.

Known to work, with tests: LLaMA, Mistral, Qwen 2 and 3, GPT-2, GPT-NeoX (Pythia), OPT. What cannot work is refused.
"""

import inspect

import torch
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """What lies under a model's head, and computes its last hidden states."""
    return model.get_decoder()


def hidden_size(model: PreTrainedModel) -> int:
    """Width of the last hidden states: not always the model's, for OPT-350m projects them down at the end."""
    return model.get_output_embeddings().in_features


def check_positions(model: PreTrainedModel) -> None:
    """Make a loaded model refuse texts that it has no positions for; refuse one that attends in a way of its own."""
    inner, family = backbone(model), model.config.model_type
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(f"{family} models take no position ids, which this project's padded batches need")
    inner.register_forward_pre_hook(_check_positions, with_kwargs=True)
    with torch.no_grad():  # attention.py says what it cannot do: now, not after an hour of reading
        inner(input_ids=torch.zeros(1, 2, dtype=torch.long, device=inner.device), use_cache=False)


def check_length(config: PretrainedConfig, tokens: int) -> None:
    """ValueError for a text that a model with a table of positions (GPT-2, OPT) has no position for.

    On a GPU it would end the process with a device-side assertion. Rotary positions are computed: no length fails.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if limit is not None and getattr(config, "rope_parameters", None) is None and tokens > limit:
        raise ValueError(
            f"a text of {tokens} tokens, but this {config.model_type} has a table of {limit} positions: "
            f"lower the recipe's lengths (prompt and response together)"
        )


def check_targets(model: PreTrainedModel, names: tuple[str, ...]) -> None:
    """ValueError for a family that PEFT has no targets for, and for a name no layer has: PEFT would pass over it."""
    family = model.config.model_type
    if not names and family not in TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING:
        raise ValueError(
            f"PEFT knows no LoRA targets for {family}: set lora.target_modules to some of "
            f"{', '.join(_matrix_names(model))}"
        )
    layers = [f".{name}" for name, _ in model.named_modules()]
    unknown = [name for name in names if not any(layer.endswith(f".{name}") for layer in layers)]
    if unknown:
        raise ValueError(
            f"lora.target_modules: {family} has no {', '.join(unknown)}; it has {', '.join(_matrix_names(model))}"
        )


def _matrix_names(model: PreTrainedModel) -> list[str]:
    """Names of the layers that multiply by a matrix, embeddings and head apart."""
    return sorted(
        {
            name.split(".")[-1]
            for name, module in backbone(model).named_modules()
            if getattr(module, "weight", None) is not None
            and module.weight.dim() == 2
            and not isinstance(module, nn.Embedding)
        }
    )


def _check_positions(inner: nn.Module, args: tuple, kwargs: dict) -> None:
    """Before a forward pass: one look at the positions, only for a family that has a table of them."""
    places = kwargs.get("position_ids")
    if places is not None and getattr(inner.config, "rope_parameters", None) is None:
        check_length(inner.config, int(places.max()) + 1)


def max_positions(*folders) -> int:
    """Tokens that every one of these models has positions for."""
    configs = map(AutoConfig.from_pretrained, folders)
    return min(getattr(config, "max_position_embeddings", None) or 2**31 for config in configs)
