"""What a layer does token by token between its matrix products, on a CPU, in one pass over memory: layers.cpp.

`install` puts it in the place of a family's own: RMSNorm, rotary positions, the gated feed-forward block. What the
kernels do not take (a GPU, a norm that learns, another dtype) goes the family's own way.

Shapes: N tokens, H heads, D width, W width of a head.
"""

import sys
from functools import partial, wraps
from types import ModuleType

import torch
from torch import nn
from transformers.activations import ACT2FN

from stages.learning.native.build import library, takes
from stages.learning.native.calls import call, views


SILU = tuple({type(ACT2FN[name]) for name in ("silu", "swish")})


def install(model: nn.Module) -> None:
    """Let the model's layers be computed by the kernels, where there are any."""
    if library() is None:
        return
    for module in model.modules():
        if _is_rms_norm(module):
            module.forward = partial(_norm, module, module.forward)
        elif _is_gated(module):
            module.forward = partial(_gated, module, module.forward)
    _turn_by_kernel(sys.modules[type(model).__module__])


def _is_rms_norm(module: nn.Module) -> bool:
    """LLaMA's, by what Transformers calls it; Gemma's, which adds 1 to its weight, has another name for epsilon."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_gated(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(part, nn.Module) for part in parts) and isinstance(getattr(module, "act_fn", None), SILU)


def _norm(module: nn.Module, own, states: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if not takes(states, weight) or states.dtype != weight.dtype or weight.requires_grad:
        return own(states)
    return _Norm.apply(states.contiguous(), weight, module.variance_epsilon)


def _gated(module: nn.Module, own, states: torch.Tensor) -> torch.Tensor:
    if not takes(states):
        return own(states)
    gate, up = module.gate_proj(states), module.up_proj(states)
    return module.down_proj(_Gated.apply(gate.contiguous(), up.contiguous()))


def _turn_by_kernel(family: ModuleType) -> None:
    """Replace the family's function, once."""
    own = getattr(family, "apply_rotary_pos_emb", None)
    if own is None or hasattr(own, "__wrapped__"):
        return

    @wraps(own)
    def turned(q, k, cos, sin, unsqueeze_dim=1):
        if unsqueeze_dim != 1 or not takes(q, k, cos, sin) or not _one_token_a_place(q, k, cos):
            return own(q, k, cos, sin, unsqueeze_dim)
        return _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)

    family.apply_rotary_pos_emb = turned


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, epsilon: float):
        out, tokens = torch.empty_like(states), states.numel() // states.shape[-1]
        inverse = torch.empty(tokens)
        call("norm", states, states, weight, out, inverse, tokens, states.shape[-1], epsilon)
        ctx.save_for_backward(states, weight, inverse)
        return out

    @staticmethod
    def backward(ctx, gradient):
        states, weight, inverse = ctx.saved_tensors
        found = torch.empty_like(states)
        call("norm_slopes", states, states, weight, gradient.contiguous(), found, inverse, len(inverse),
             states.shape[-1])
        return found, None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        call("gated", gate, gate, up, out, gate.numel())
        return out

    @staticmethod
    def backward(ctx, gradient):
        gate, up = ctx.saved_tensors
        slopes = torch.empty_like(gate), torch.empty_like(up)
        call("gated_slopes", gate, gate, up, gradient.contiguous(), *slopes, gate.numel())
        return slopes


def _one_token_a_place(q, k, cos) -> bool:
    """[1, H, N, W] of rows laid end to end, or [B, H, 1, W] of their newest tokens; cos and sin [·, ·, W]."""
    return (q.dtype == k.dtype == cos.dtype and 1 in (q.shape[0], q.shape[2]) and cos.shape[-1] == q.shape[-1]
            and cos.shape[:2].numel() == q.shape[0] * q.shape[2])


def _by_token(states: torch.Tensor) -> torch.Tensor:
    """[1, H, N, W] or [N, H, 1, W] to [N, H, W], the last dimension in one piece."""
    found = states[0].transpose(0, 1) if states.shape[0] == 1 else states[:, :, 0]
    return found if found.stride(2) == 1 else found.contiguous()


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, cosine, sine):
        ctx.angles = cosine.contiguous(), sine.contiguous()
        return _turned(states, *ctx.angles, back=False)

    @staticmethod
    def backward(ctx, gradient):
        return _turned(gradient, *ctx.angles, back=True), None, None


def _turned(states, cosine, sine, back: bool) -> torch.Tensor:
    given = _by_token(states)
    out = torch.empty(given.shape, dtype=given.dtype)
    call("turn", given, *views(given), cosine, sine, *views(out), *given.shape, back)
    return out.transpose(0, 1)[None] if states.shape[0] == 1 else out[:, :, None]
