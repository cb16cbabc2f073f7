"""Compute RMSNorm, SwiGLU and rotary embedding of a model by the kernels (layers.cpp), each in one pass over memory.

`replace_layers` gives modules of one model instance a subclass of their class whose forward calls a kernel. Classes and
modules of Transformers stay as they are. A module is replaced only if its class's forward has the bytecode of LLaMA's
and both give the same result on random inputs: some families scale, clamp or drop out under the same names, and equal
code may call other functions. What the kernels do not support (a GPU, another dtype, torch.compile) takes the class's
own forward.

Shapes: N tokens, H heads, D width, W head width.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from types import FunctionType

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from stages.modeling.cpu_kernels.build import apply, call, supports, views

SILU = tuple({type(ACT2FN[name]) for name in ("silu", "swish")})
ROTARY = "apply_rotary_pos_emb"
TOLERANCE = 0.02  # of the largest value: above rounding, also in bf16 and int8, and below another formula


@torch.no_grad()
def replace_layers(model: nn.Module) -> None:
    """Let the model's norms, gated MLPs and rotary embeddings compute by the kernels, where these are equivalent."""
    dtype, subclasses = model.get_input_embeddings().weight.dtype, _attention_subclasses(model)
    for module in model.modules():
        kind = type(module)
        if kind not in subclasses:
            if _is_rms_norm(module):
                states = _random_states(1, 3, len(module.weight)).to(module.weight.dtype)
                subclasses[kind] = _equivalent_subclass(module, modeling_llama.LlamaRMSNorm, KernelRMSNorm, states)
            elif _is_gated_mlp(module):
                states = _random_states(1, 3, module.gate_proj.in_features).to(dtype)
                subclasses[kind] = _equivalent_subclass(module, modeling_llama.LlamaMLP, KernelMLP, states)
        module.__class__ = subclasses.get(kind, kind)


def _equivalent_subclass(module: nn.Module, llama: type, mixin: type, states: torch.Tensor) -> type:
    """Return the class of `module` with the mixin's forward, or the class itself where that is not equivalent."""
    kind = type(module)
    if _bytecode(kind.forward) != _bytecode(llama.forward):
        return kind
    return subclass(kind, mixin) if _close(kind.forward(module, states), mixin.compute(module, states)) else kind


def _attention_subclasses(model: nn.Module) -> dict[type, type]:
    """Map the model's attention classes to subclasses that call the rotary kernel, if the family rotates as LLaMA does.

    Families call a function of their module. The subclass's forward has the same code with that one name replaced.
    """
    family = sys.modules[type(model).__module__]
    own, inputs = getattr(family, ROTARY, None), (*_random_states(2, 1, 2, 3, 8), *_random_states(2, 1, 3, 8))
    if _bytecode(own) != _bytecode(modeling_llama.apply_rotary_pos_emb):
        return {}
    if not all(map(_close, own(*inputs), _apply_rotary(own, *inputs))):
        return {}
    kinds = {type(module) for module in model.modules() if _calls_rotary(type(module).forward, vars(family))}
    return {kind: _rotary_subclass(kind) for kind in kinds}


def _calls_rotary(forward: Callable, names: dict) -> bool:
    return getattr(forward, "__globals__", None) is names and ROTARY in forward.__code__.co_names


@cache
def _rotary_subclass(kind: type) -> type:
    own = kind.forward
    names = own.__globals__ | {ROTARY: partial(_apply_rotary, own.__globals__[ROTARY])}
    del names["__name__"]  # or torch.compile would read the names from the module instead
    forward = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    forward.__kwdefaults__ = own.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": forward})


def _close(expected: torch.Tensor, result: torch.Tensor) -> bool:
    difference = (expected - result).abs().max()
    return bool(difference <= TOLERANCE * expected.abs().max())


def _bytecode(function: Callable | None) -> tuple | None:
    """Return what a function does and the names it uses; None if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return code and (code.co_code, code.co_names, code.co_varnames)


def _random_states(*shape: int) -> torch.Tensor:
    """Draw any inputs, cosines and sines too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cache
def subclass(kind: type, mixin: type) -> type:
    """Return the class with the mixin's forward, under the same name; `kind` itself stays as it is."""
    return type(kind.__name__, (mixin, kind), {})


def _is_rms_norm(module: nn.Module) -> bool:
    """Recognise LLaMA's by its attributes; Gemma's, which adds 1 to its weight, has another name for epsilon."""
    return type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon")


def _is_gated_mlp(module: nn.Module) -> bool:
    parts = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return all(isinstance(part, nn.Module) for part in parts) and isinstance(getattr(module, "act_fn", None), SILU)


class KernelRMSNorm:
    """Mixin for an RMSNorm class like LLaMA's."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.dtype != self.weight.dtype or not supports(hidden_states, self.weight):
            return super().forward(hidden_states)
        return KernelRMSNorm.compute(self, hidden_states)

    @staticmethod
    def compute(module: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """Call the kernel."""
        return apply(RMSNorm, hidden_states.contiguous(), module.weight, module.variance_epsilon)


class KernelMLP:
    """Mixin for a gated MLP class like LLaMA's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return KernelMLP.compute(self, x) if supports(x) else super().forward(x)

    @staticmethod
    def compute(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Call the kernel between the matrix products."""
        gate, up = module.gate_proj(x), module.up_proj(x)
        if gate.dtype != up.dtype:
            return module.down_proj(module.act_fn(gate) * up)
        return module.down_proj(apply(SwiGLU, gate.contiguous(), up.contiguous()))


def _apply_rotary(own: Callable, q, k, cos, sin, unsqueeze_dim: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    if unsqueeze_dim != 1 or not supports(q, k, cos, sin) or not _is_packed(q, k, cos):
        return own(q, k, cos, sin, unsqueeze_dim)
    return apply(Rotary, q, cos, sin), apply(Rotary, k, cos, sin)


class RMSNorm(torch.autograd.Function):
    """weight * x / sqrt(mean(x^2) + epsilon)."""

    @staticmethod
    def forward(ctx, states, weight, epsilon: float):
        out, tokens = torch.empty_like(states), states.numel() // states.shape[-1]
        inverse_rms = torch.empty(tokens)
        call("rms_norm", states, states, weight, out, inverse_rms, tokens, states.shape[-1], epsilon)
        ctx.save_for_backward(states, weight, inverse_rms)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        states, weight, inverse_rms = ctx.saved_tensors
        grad, grad_out = torch.empty_like(states), grad_out.contiguous()
        call("rms_norm_backward", states, states, weight, grad_out, grad, inverse_rms, len(inverse_rms),
             states.shape[-1])
        return grad, _weight_gradient(states, grad_out, inverse_rms) if ctx.needs_input_grad[1] else None, None


def _weight_gradient(states, grad_out, inverse_rms) -> torch.Tensor:
    """Compute [D], needed where all weights are trained."""
    parts = states.flatten(0, -2) * inverse_rms[:, None] * grad_out.flatten(0, -2)
    return parts.sum(0).to(states.dtype)


class SwiGLU(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx, gate, up):
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        call("swiglu", gate, gate, up, out, gate.numel())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        gate, up = ctx.saved_tensors
        grads = torch.empty_like(gate), torch.empty_like(up)
        call("swiglu_backward", gate, gate, up, grad_out.contiguous(), *grads, gate.numel())
        return grads


class Rotary(torch.autograd.Function):
    """Rotary embedding of [1, H, N, W] or [B, H, 1, W]."""

    @staticmethod
    def forward(ctx, states, cosine, sine):
        ctx.angles = cosine.contiguous(), sine.contiguous()
        return _rotate(states, *ctx.angles, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        return _rotate(grad_out, *ctx.angles, inverse=True), None, None


def _is_packed(q, k, cos) -> bool:
    """Check for q of a packed batch, [1, H, N, W], or of new tokens, [B, H, 1, W], with one angle [·, ·, W] a token."""
    return (q.dtype == k.dtype == cos.dtype and 1 in (q.shape[0], q.shape[2]) and cos.shape[-1] == q.shape[-1]
            and cos.shape[:2].numel() == q.shape[0] * q.shape[2])


def _rotate(states, cosine, sine, inverse: bool) -> torch.Tensor:
    by_token = states[0].transpose(0, 1) if states.shape[0] == 1 else states[:, :, 0]  # [N, H, W]
    by_token = by_token if by_token.stride(2) == 1 else by_token.contiguous()
    out = torch.empty(by_token.shape, dtype=by_token.dtype)
    call("apply_rotary", by_token, *views(by_token), cosine, sine, *views(out), *by_token.shape, inverse)
    return out.transpose(0, 1)[None] if states.shape[0] == 1 else out[:, :, None]
