"""Load models: precision, device, attention implementation and CPU kernels.

Precisions: 'fp32'; 'mixed' (fp32 weights, bf16 matrix products by autocast); 'bf16' (bf16 weights); 'int8' and 'nf4'
(bitsandbytes). fp16 is not offered: its range loses gradients without loss scaling.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from stages.modeling.cpu_kernels.build import load_library
from stages.modeling.cpu_kernels.layers import replace_layers
from stages.modeling.families import check_positions
from stages.modeling.finite_weights import check_finite
from stages.modeling.packed import attention

QUANTISED = ("int8", "nf4")


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


def load_causal(folder: Path | str, precision: str = "fp32", cpu_kernels: str = "off") -> PreTrainedModel:
    """Load a causal language model on this process's device, in eval mode."""
    return load_pretrained(AutoModelForCausalLM, folder, precision, cpu_kernels)


def load_pretrained(
    auto_class, folder, precision: str, cpu_kernels: str = "off", optional_weights: tuple[str, ...] = (), **more
) -> PreTrainedModel:
    """Load a model in eval mode, with packed attention; ValueError if weights are missing.

    Args:
        auto_class: a class of Transformers with `from_pretrained`.
        cpu_kernels: 'auto' computes with the CPU kernels where possible, 'off' with torch only.
        optional_weights: names of weights that may be missing, and are then random.
        more: arguments of `from_pretrained`.
    """
    if precision == "int8":
        more["quantization_config"] = BitsAndBytesConfig(load_in_8bit=True, llm_int8_skip_modules=["lm_head", "score"])
    elif precision == "nf4":
        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
            llm_int8_skip_modules=["lm_head", "score"],
        )
    dtype = torch.float32 if precision in ("fp32", "mixed") else torch.bfloat16
    use_kernels = resolve_cpu_kernels(cpu_kernels)
    attention.register()
    model, info = auto_class.from_pretrained(
        folder, dtype=dtype, device_map={"": device()}, use_safetensors=True, output_loading_info=True,
        attn_implementation=attention.PACKED_CPU_KERNELS if use_kernels else attention.PACKED, **more
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
    check_positions(model)
    return model
