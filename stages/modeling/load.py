"""Load models and tokenizers: one place for precision, device, special tokens and adapters.

Precisions: 'fp32'; 'mixed' (fp32 weights, bf16 matrix products by autocast); 'bf16' (bf16 weights); 'int8' and 'nf4'
(bitsandbytes). fp16 is not offered: its range loses gradients without loss scaling.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    PreTrainedModel,
)

from stages.modeling.cpu_kernels.patch_llama import install
from stages.modeling.families import check_positions
from stages.modeling.packed import attention

QUANTISED = ("int8", "nf4")


def device() -> torch.device:
    """The process's accelerator, or the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def load_causal(folder: Path | str, precision: str = "fp32") -> PreTrainedModel:
    """A causal language model on this process's device, in eval mode."""
    return load_pretrained(AutoModelForCausalLM, folder, precision)


def autocast(precision: str):
    """The context of a forward pass in this precision."""
    return torch.autocast(device().type, dtype=torch.bfloat16) if precision == "mixed" else nullcontext()


def load_pretrained(kind, folder, precision: str, may_miss: tuple[str, ...] = (), **more) -> PreTrainedModel:
    where = device()
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
    model, info = kind.from_pretrained(
        folder, dtype=dtype, device_map={"": where}, use_safetensors=True, output_loading_info=True,
        attn_implementation=attention.NAME, **more
    )
    missing = set(info["missing_keys"]) - set(may_miss)
    if missing:
        raise ValueError(f"{folder} lacks the weights {', '.join(sorted(missing)[:3])}: they would be random")
    for module in model.modules():
        # bitsandbytes repacks nf4 weights at the first forward without gradients on such a CPU, and from then on no
        # gradient flows through them: an adapter would stop learning in silence after the first sample is drawn.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    model.eval()
    install(model)
    check_positions(model)
    return model
