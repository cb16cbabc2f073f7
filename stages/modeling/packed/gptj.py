"""Packed attention for GPT-J, whose code in Transformers has no attention interface.

Transformers makes a GPT-J layer's attention from a table of classes by the name of the implementation; `register` adds
one. Its layers pass on no further arguments, so that the batch travels as an attribute of the attention mask.
"""

import torch
from torch import nn
from transformers.models.gptj import modeling_gptj

from stages.modeling.packed import attention


class PackedGPTJAttention(modeling_gptj.GPTJAttention):
    """GPT-J's attention by `attention.attend`."""

    def _attn(self, query, key, value, attention_mask=None):
        """Attend, [B, H, T, W] to [B, H, T, W] and None (no attention weights)."""
        kernels = self.config._attn_implementation == attention.PACKED_CPU_KERNELS
        out, _ = attention.attend(
            self, query.to(value.dtype), key.to(value.dtype), value, attention_mask, scaling=1 / float(self.scale_attn),
            batch=getattr(attention_mask, "batch", None), cpu_kernels=kernels)
        return out.transpose(1, 2), None


def register() -> None:
    """Add the class to Transformers' table, under the names of the packed implementations. Idempotent."""
    for name in (attention.PACKED, attention.PACKED_CPU_KERNELS):
        modeling_gptj.GPTJ_ATTENTION_CLASSES[name] = PackedGPTJAttention


def carry_batch(backbone: nn.Module) -> None:
    """Make a GPT-J's forward passes carry their argument `batch` to the attention layers."""
    backbone.register_forward_pre_hook(_attach_batch, with_kwargs=True)


def _attach_batch(backbone: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    if kwargs.get("batch") is None:
        return args, kwargs
    mask = torch.empty_like(attention.NO_MASK)
    mask.batch = kwargs["batch"]
    return args, kwargs | {"attention_mask": mask}
