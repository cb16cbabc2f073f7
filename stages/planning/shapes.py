"""Find the configuration of a base model, and build models on the meta device: shapes without weights."""

from copy import deepcopy
from pathlib import Path

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.pytorch_utils import Conv1D

from stages.model_files.gguf_header import is_gguf, read_gguf_header
from stages.modeling.load import QUANTISED, carry_batch, precision_arguments, register_attention
from stages.modeling.packed import attention
from stages.modeling.tiny_llama import build_small_llama
from stages.training.memory_estimate import distinct_bytes, iter_tensors

BUNDLED = Path(__file__).parents[2] / "configs/shapes"
META = torch.device("meta")
NF4_BLOCK = 64  # weights that share a scale


def find_config(model: str, revision: str | None, scratch: object) -> PretrainedConfig:
    """Return the configuration of a folder, a GGUF file, a bundled shape, a hub model or 'scratch'.

    Raises ValueError, in one line, if there is none.
    """
    if model == "scratch":
        return _scratch_config(scratch)
    folder, bundled = Path(model), BUNDLED / f"{model.replace('/', '--')}.json"
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"base.model: {folder} has no config.json: give the folder of a model")
        return AutoConfig.from_pretrained(folder)
    if is_gguf(model):
        read_gguf_header(folder)
        return AutoConfig.from_pretrained(folder.parent, gguf_file=folder.name)
    return AutoConfig.from_pretrained(bundled if bundled.is_file() else _download(model, revision))


def build_causal(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a causal model on the meta device, with packed attention."""
    return _build(AutoModelForCausalLM, config, dtype)


def build_classifier(config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Build a sequence classifier with one output on the meta device, with packed attention."""
    config = deepcopy(config)
    config.num_labels = 1
    return _build(AutoModelForSequenceClassification, config, dtype)


def _build(auto_class, config: PretrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    register_attention(config)
    with META:
        model = auto_class.from_config(config, dtype=dtype, attn_implementation=attention.PACKED)
    carry_batch(model)
    return model.eval().requires_grad_(False)


def layer_period(config: PretrainedConfig) -> int:
    """Return the number of layers after which their kinds repeat; 1 if all are alike."""
    layers = config.num_hidden_layers
    kinds = [values for values in config.to_dict().values() if isinstance(values, list) and len(values) == layers]
    periods = (period for period in range(1, layers) if all(
        values[i] == values[i % period] for values in kinds for i in range(layers)))
    return next(periods, layers)


def with_layers(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return the configuration with the first layers only."""
    shallow, total = deepcopy(config), config.num_hidden_layers
    for name, values in config.to_dict().items():
        if isinstance(values, list) and len(values) == total:
            setattr(shallow, name, values[:layers])
    shallow.num_hidden_layers = layers
    return shallow


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """Count all parameters, tied ones once, and those that are trained."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def weights_dtype(precision: str) -> torch.dtype:
    """Return the number format of the weights that a precision loads."""
    return precision_arguments(precision)["dtype"]


def states_dtype(precision: str) -> torch.dtype:
    """Return the number format of hidden states, keys and values: with an adapter on quantised weights, fp32."""
    return torch.float32 if precision in QUANTISED else weights_dtype(precision)


def stored_bytes(config: PretrainedConfig, precision: str) -> int:
    """Return the bytes of the weights of a causal model, tied ones once, as a precision stores them."""
    model = build_causal(config, weights_dtype(precision))
    store_quantised(model, precision)
    return distinct_bytes(iter_tensors(model))


def layer_bytes(config: PretrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of the matrices of all layers."""
    model = build_causal(config, dtype)
    return sum(p.nbytes for name, p in model.named_parameters() if p.dim() == 2 and ".layers." in name)


def cast_unquantised(model: nn.Module, precision: str) -> None:
    """Give the layers that bitsandbytes leaves alone fp32 weights, as PEFT does before training (k-bit training).

    A quantised layer returns what it is given, fp32, and computes in bf16.
    """
    if precision not in QUANTISED:
        return
    quantised = set(quantised_layers(model, precision))
    for layer in quantised:
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(module.weight.dtype), *inputs[1:]))
        layer.register_forward_hook(lambda module, inputs, out: out.float())
    inside = {id(p) for layer in quantised for p in layer.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.data = parameter.data.float()


def store_quantised(model: nn.Module, precision: str) -> None:
    """Replace the weights of quantised layers by what bitsandbytes stores; the model cannot compute afterwards."""
    for layer in quantised_layers(model, precision) if precision in QUANTISED else ():
        rows, count = layer.weight.shape[0], layer.weight.numel()
        stored, scales = (count, rows) if precision == "int8" else (count // 2, count // NF4_BLOCK)
        layer.weight = nn.Parameter(torch.empty(stored, dtype=torch.int8, device=META), requires_grad=False)
        layer.weight.quant_type = precision
        layer.register_buffer("scales", torch.empty(scales, device=META))


def quantised_layers(model: nn.Module, precision: str) -> list[nn.Module]:
    """List the layers that bitsandbytes quantises."""
    skipped = precision_arguments(precision)["quantization_config"].llm_int8_skip_modules
    return [layer for name, layer in model.named_modules()
            if type(layer) in (nn.Linear, Conv1D) and ".lora_" not in name and not layer.weight.requires_grad
            and not any(part in skipped for part in name.split("."))]


def _download(model: str, revision: str | None) -> Path:
    """Download config.json alone."""
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json", revision=revision))
    except (OSError, ValueError) as error:  # the hub's own errors are OSErrors
        reason = str(error).strip().split("\n")[0]
        raise ValueError(f"base.model: no config.json of {model} ({type(error).__name__}: {reason}): give a local "
                         f"folder, as --config base='{{model: FOLDER}}', or connect to the hub") from None


def _scratch_config(scratch: object) -> PretrainedConfig:
    with META:
        return build_small_llama(
            _Tokenizer(scratch.vocabulary_tokens), hidden_size=scratch.hidden_size,
            intermediate_size=scratch.intermediate_size, layers=scratch.layers, heads=scratch.heads,
            max_position_tokens=scratch.max_position_tokens, initializer_range=scratch.initializer_range).config


class _Tokenizer:
    """What build_small_llama reads of a tokenizer: its size and its special tokens."""

    pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

    def __init__(self, tokens: int):
        self.tokens = tokens

    def __len__(self) -> int:
        return self.tokens
