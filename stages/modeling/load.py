"""Load models: precision, device, attention implementation and CPU kernels.

Precisions: 'fp32'; 'mixed' (fp32 weights, bf16 matrix products by autocast); 'bf16' (bf16 weights); 'int8' and 'nf4'
(bitsandbytes). fp16 is not offered: its range loses gradients without loss scaling.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, PretrainedConfig, PreTrainedModel
from transformers.models.gptj import modeling_gptj

from stages.model_files.loadable import check_whole_model
from stages.modeling.cpu_kernels.build import load_library
from stages.modeling.cpu_kernels.layers import replace_layers
from stages.modeling.families import backbone, caps_attention, check_positions, check_text_only, first_layers
from stages.modeling.finite_weights import check_finite
from stages.modeling.output_layer import check_logits
from stages.modeling.packed import attention
from stages.modeling.packed.forward import check_packing
from stages.modeling.q_heads import has_q_heads, shift_by_folder

QUANTISED = ("int8", "nf4")
GPTJ = "gptj"  # the family whose attention has no interface in Transformers


def device() -> torch.device:
    """Return the process's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def autocast(precision: str):
    """Return the context of a forward pass in this precision."""
    return torch.autocast(device().type, dtype=torch.bfloat16) if precision == "mixed" else nullcontext()


def resolve_cpu_kernels(setting: str) -> bool:
    """Check whether models of this process can use the CPU kernels; setting: 'auto', which compiles them, or 'off'."""
    return setting == "auto" and device().type == "cpu" and load_library() is not None


def precision_arguments(precision: str) -> dict:
    """Return the arguments of `from_pretrained` for a precision: the dtype and, if it is quantised, how."""
    if precision == "int8":
        quantised = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "score"])
    elif precision == "nf4":
        quantised = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["lm_head", "score"],
        )
    else:
        return {"dtype": torch.bfloat16 if precision == "bf16" else torch.float32}
    return {"dtype": torch.bfloat16, "quantization_config": quantised}


def load_causal(folder: Path | str, precision: str = "fp32", cpu_kernels: str = "off") -> PreTrainedModel:
    """Load a causal language model on this process's device, in eval mode.

    Q heads in its folder (of ilql) shift its logits: what is loaded is the policy that the heads define.
    """
    model = load_pretrained(AutoModelForCausalLM, folder, precision, cpu_kernels)
    check_logits(model)
    if has_q_heads(folder):
        shift_by_folder(model, folder)
    return model


def load_pretrained(
    auto_class, folder, precision: str, cpu_kernels: str = "off", optional_weights: tuple[str, ...] = (),
    layers: int | None = None, **more
) -> PreTrainedModel:
    """Load a model in eval mode, with packed attention; ValueError if weights are missing.

    Args:
        auto_class: a class of Transformers with `from_pretrained`.
        optional_weights: names of weights that may be missing, and are then random.
        layers: load only the first ones; None: all.
        more: arguments of `from_pretrained`.
    """
    check_whole_model(folder)
    config = AutoConfig.from_pretrained(folder)
    check_text_only(config)
    use_kernels = resolve_cpu_kernels(cpu_kernels) and not caps_attention(config)
    register_attention(config)
    model, info = auto_class.from_pretrained(
        folder, device_map={"": device()}, use_safetensors=True, output_loading_info=True,
        attn_implementation=attention.PACKED_CPU_KERNELS if use_kernels else attention.PACKED,
        **precision_arguments(precision), **first_layers(config, layers), **more
    )
    missing = set(info["missing_keys"]) - set(optional_weights)
    if missing:
        raise ValueError(f"{folder} lacks the weights {', '.join(sorted(missing)[:3])}: they would be random")
    check_finite(((name, weight) for name, weight in model.named_parameters() if name not in missing),
                 f"{folder} is damaged, or its training diverged")
    for module in model.modules():
        # bitsandbytes repacks nf4 weights at the first forward without gradients on such a CPU, and from then on no
        # gradient flows through them: an adapter would stop learning in silence after the first sample is drawn.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.eval()
    if use_kernels:
        replace_layers(model)
    carry_batch(model)
    check_positions(model)
    check_packing(model)
    return model


def register_attention(config: PretrainedConfig) -> None:
    """Make packed attention known to Transformers, before a model of this family is built."""
    attention.register()
    if config.model_type == GPTJ:
        for name in (attention.PACKED, attention.PACKED_CPU_KERNELS):
            modeling_gptj.GPTJ_ATTENTION_CLASSES[name] = PackedGPTJAttention


def carry_batch(model: PreTrainedModel) -> None:
    """Make the model's forward passes carry their argument `batch` to the attention; most families' do."""
    if model.config.model_type == GPTJ:
        backbone(model).register_forward_pre_hook(_attach_batch, with_kwargs=True)


class PackedGPTJAttention(modeling_gptj.GPTJAttention):
    """GPT-J's attention by `attention.attend`: the family's code in Transformers has no attention interface.

    Transformers makes a GPT-J layer's attention from a table of classes by the name of the implementation. Its layers
    pass on no further arguments, so that the batch travels as an attribute of the attention mask.
    """

    def _attn(self, query, key, value, attention_mask=None):
        """Attend, [B, H, T, W] to [B, H, T, W] and None (no attention weights)."""
        kernels = self.config._attn_implementation == attention.PACKED_CPU_KERNELS
        out, _ = attention.attend(
            self, query.to(value.dtype), key.to(value.dtype), value, attention_mask, scaling=1 / float(self.scale_attn),
            batch=getattr(attention_mask, "batch", None), cpu_kernels=kernels)
        return out.transpose(1, 2), None


def _attach_batch(inner: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if kwargs.get("batch") is None:
        return args, kwargs
    mask = torch.empty_like(attention.NO_MASK)
    mask.batch = kwargs["batch"]
    return args, kwargs | {"attention_mask": mask}
