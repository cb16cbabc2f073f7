"""What model families do differently, asked of the library or of the model itself: no table of names.

Known to work, with tests: LLaMA, Mistral, Qwen 2 and 3, GPT-2, GPT-NeoX (Pythia), OPT. What cannot work is refused.
"""

import inspect

import torch
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.masking_utils import create_masks_for_generate


def trunk(model: PreTrainedModel) -> PreTrainedModel:
    """What lies under a model's head, and computes its last hidden states."""
    return model.get_decoder()


def width(model: PreTrainedModel) -> int:
    """Width of the last hidden states: not always the model's, for OPT-350m projects them down at the end."""
    return model.get_output_embeddings().in_features


def guard(model: PreTrainedModel, packs: bool) -> None:
    """Make a loaded model refuse texts that it has no positions for; packs: and keep packed documents apart."""
    inner, family = trunk(model), model.config.model_type
    if "position_ids" not in inspect.signature(inner.forward).parameters:
        raise ValueError(f"{family} models take no position ids, which this project's padded batches need")
    inner.register_forward_pre_hook(_check_positions, with_kwargs=True)
    if packs and not _keeps_documents_apart(inner):
        inner.register_forward_pre_hook(_mask_other_documents, with_kwargs=True)


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
            f"PEFT knows no LoRA targets for {family}: set lora.target_modules to some of {', '.join(_matrices(model))}"
        )
    layers = [f".{name}" for name, _ in model.named_modules()]
    unknown = [name for name in names if not any(layer.endswith(f".{name}") for layer in layers)]
    if unknown:
        raise ValueError(
            f"lora.target_modules: {family} has no {', '.join(unknown)}; it has {', '.join(_matrices(model))}"
        )


def _matrices(model: PreTrainedModel) -> list[str]:
    """Names of the layers that multiply by a matrix, embeddings and head apart."""
    return sorted(
        {
            name.split(".")[-1]
            for name, module in trunk(model).named_modules()
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


@torch.no_grad()
def _keeps_documents_apart(inner: nn.Module) -> bool:
    """Whether positions that restart cut the attention: the second document's states must not feel the first one."""
    ids = torch.tensor([[0, 0, 1, 2], [1, 2, 1, 2]], device=inner.device)
    places = torch.tensor([[0, 1, 0, 1]] * 2, device=inner.device)
    one, other = inner(input_ids=ids, position_ids=places, use_cache=False).last_hidden_state[:, 2:]
    return torch.equal(one, other)  # where rounding alone parts them, the mask below is the one they have already


def _mask_other_documents(inner: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Transformers' own mask of packed documents, for a family (OPT) that does not ask for it itself."""
    places = kwargs.get("position_ids")
    if places is None or kwargs.get("attention_mask") is not None or kwargs.get("past_key_values") is not None:
        return None
    like_inputs = torch.empty(*places.shape, 1, dtype=inner.dtype, device=places.device)
    mask = create_masks_for_generate(inner.config, like_inputs, None, None, position_ids=places)
    return args, kwargs | {"attention_mask": mask}
