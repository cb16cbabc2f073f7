"""What a layer does token by token between its matrix products, on a CPU, in one pass over memory: layers.cpp.

`install` puts it in the place of a family's own: RMSNorm, rotary positions, the gated feed-forward block. What the
kernels do not take (a GPU, another dtype, torch.compile) goes the family's own way.

Shapes: N tokens, H heads, D width, W width of a head.
"""

import sys
from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from types import ModuleType

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from stages.modeling.cpu_kernels.bindings import call, views
from stages.modeling.cpu_kernels.build import library, takes

CLOSE_SHARE = 0.02  # of the largest value: rounding is less, in bf16 and int8, too; another formula is more
SILU = tuple({type(ACT2FN[name]) for name in ("silu", "swish")})


@torch.no_grad()
def install(model: nn.Module) -> None:
    """Let a CPU compute the model's layers by the kernels, where there are any; its family's classes are changed."""
    if model.device.type != "cpu" or library() is None:
        return
    dtype = model.get_input_embeddings().weight.dtype
    for module in model.modules():
        if _is_rms_norm(module):
            states = _any(1, 3, len(module.weight)).to(module.weight.dtype)
            _replace(type(module), "forward", modeling_llama.LlamaRMSNorm, _norm, module, states)
        elif _is_gated(module):
            states = _any(1, 3, module.gate_proj.in_features).to(dtype)
            _replace(type(module), "forward", modeling_llama.LlamaMLP, _gated, module, states)
    family, states, angles = sys.modules[type(model).__module__], _any(2, 1, 2, 3, 8), _any(2, 1, 3, 8)
    _replace(family, "apply_rotary_pos_emb", modeling_llama, _turned_pair, *states, *angles)


def _replace(owner: type | ModuleType, name: str, llamas: type | ModuleType, by: Callable, *given) -> None:
    """Put by(own, ...) in the place of owner's `name`, once, if it is LLaMA's code and says the same of what is given.

    Names do not tell: some families turn neighbours instead of halves, drop or clamp what is gated, scale it. Nor does
    code alone: what it calls may be another's.
    """
    own = getattr(owner, name, None)
    if own is None or hasattr(own, "by_kernel") or _code(own) != _code(getattr(llamas, name)):
        return
    if not _same(own(*given), by(own, *given)):
        return

    @wraps(own)
    def found(*arguments, **named):
        return by(own, *arguments, **named)

    found.by_kernel = True
    setattr(owner, name, found)


def _code(function: Callable) -> tuple | None:
    code = getattr(unwrap(function), "__code__", None)
    return code and (code.co_code, code.co_names, code.co_varnames)


def _same(found, expected) -> bool:
    pairs = zip(_tuple(found), _tuple(expected), strict=True)
    return all((a - b).abs().max() <= CLOSE_SHARE * a.abs().max() for a, b in pairs)


def _tuple(found) -> tuple:
    return found if isinstance(found, tuple) else (found,)


def _any(*shape: int) -> torch.Tensor:
    """Any numbers will do, for cosines and sines, too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def _is_rms_norm(module: nn.Module) -> bool:
    """LLaMA's, by what Transformers calls it; Gemma's, which adds 1 to its weight, has another name for epsilon."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_gated(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(part, nn.Module) for part in parts) and isinstance(getattr(module, "act_fn", None), SILU)


def _norm(own: Callable, module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    weight = module.weight
    if states.dtype != weight.dtype or not takes(states, weight):
        return own(module, states)
    return _Norm.apply(states.contiguous(), weight, module.variance_epsilon)


def _gated(own: Callable, module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    if not takes(states):
        return own(module, states)
    gate, up = module.gate_proj(states), module.up_proj(states)
    if gate.dtype != up.dtype:
        return module.down_proj(module.act_fn(gate) * up)
    return module.down_proj(_Gated.apply(gate.contiguous(), up.contiguous()))


def _turned_pair(own: Callable, q, k, cos, sin, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    if unsqueeze_dim != 1 or not takes(q, k, cos, sin) or not _one_token_a_place(q, k, cos):
        return own(q, k, cos, sin, unsqueeze_dim)
    return _Turn.apply(q, cos, sin), _Turn.apply(k, cos, sin)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, epsilon: float):
        out, tokens = torch.empty_like(states), states.numel() // states.shape[-1]
        inverse = torch.empty(tokens)
        call("norm", states, states, weight, out, inverse, tokens, states.shape[-1], epsilon)
        ctx.save_for_backward(states, weight, inverse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        states, weight, inverse = ctx.saved_tensors
        found, gradient = torch.empty_like(states), gradient.contiguous()
        call("norm_slopes", states, states, weight, gradient, found, inverse, len(inverse), states.shape[-1])
        return found, _of_weight(states, gradient, inverse) if ctx.needs_input_grad[1] else None, None


def _of_weight(states, gradient, inverse) -> torch.Tensor:
    """[D]: a base that learns whole."""
    parts = states.flatten(0, -2) * inverse[:, None] * gradient.flatten(0, -2)
    return parts.sum(0).to(states.dtype)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        call("gated", gate, gate, up, out, gate.numel())
        return out

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx, gradient):
        return _turned(gradient, *ctx.angles, back=True), None, None


def _turned(states, cosine, sine, back: bool) -> torch.Tensor:
    given = _by_token(states)
    out = torch.empty(given.shape, dtype=given.dtype)
    call("turn", given, *views(given), cosine, sine, *views(out), *given.shape, back)
    return out.transpose(0, 1)[None] if states.shape[0] == 1 else out[:, :, None]
