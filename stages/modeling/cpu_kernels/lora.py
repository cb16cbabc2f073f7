"""Compute a linear layer with its LoRA adapter on a CPU in bf16: six products, and dropout by a kernel (dropout.cpp).

PEFT's own forward would convert the inputs to fp32, multiply there, and draw a mask for each layer in one thread. Here
a bf16 layer's adapter, whose weights stay fp32, is multiplied in bf16 as under autocast, and its product is added to
the layer's own in place. The dropout of PEFT's adapter, a mask for each layer, is computed from a seed, and again in
the backward pass.

Shapes: N tokens, I inputs, O outputs, R rank.
"""

import torch
from peft.tuners import lora
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.modeling.cpu_kernels.bindings import apply, call
from stages.modeling.cpu_kernels.build import supports
from stages.modeling.cpu_kernels.equivalence import subclass


def replace_lora_layers(model: nn.Module) -> None:
    """Let the model's adapted linear layers compute by `LoraProduct` wherever one plain adapter is active, in bf16."""
    for module in model.modules():
        if type(module) is lora.Linear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = subclass(lora.Linear, KernelLoraLinear)


class KernelLoraLinear:
    """Mixin for PEFT's adapted linear layer."""

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Compute [..., O] from [..., I] by `LoraProduct` where it can, else as PEFT does."""
        layer = self.get_base_layer()
        if args or kwargs or not x.dtype == layer.weight.dtype == torch.bfloat16 or not supports(x):
            return super().forward(x, *args, **kwargs)
        if (name := plain_adapter(self)) is None:
            return super().forward(x)
        dropout = self.lora_dropout[name]
        probability = dropout.p if self.training and isinstance(dropout, nn.Dropout) else 0.0
        out = apply(LoraProduct, x.flatten(0, -2), layer.weight, layer.bias, self.lora_A[name].weight,
                    self.lora_B[name].weight, self.scaling[name], probability)
        return out.unflatten(0, x.shape[:-1])


def plain_adapter(layer: lora.Linear) -> str | None:
    """Return the active adapter; None if there is not exactly one, or if it is not LoRA's plain form."""
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.disable_adapters or layer.merged or len(names) != 1 or layer.lora_bias[names[0]]:
        return None
    return None if names[0] in layer.lora_variant else names[0]


class LoraProduct(torch.autograd.Function):
    """x W' + bias + scaling * dropout(x) A' B' for x [N, I] and frozen W [O, I], in bf16; A [R, I] and B [O, R] learn.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, down, up, scaling: float, probability: float):
        ctx.seed = int(torch.randint(1 << 62, ())) if probability else 0
        ctx.scaling, ctx.probability, ctx.dtypes = scaling, probability, (down.dtype, up.dtype)
        down, up = adapter_matrices(down, up, scaling)
        low = functional.linear(_drop_out(x, ctx), down)
        ctx.save_for_backward(x, weight, down, up, low)
        return functional.linear(x, weight, bias).addmm_(low, up.t())

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        x, weight, down, up, low = ctx.saved_tensors
        grad_low, grad = grad_out @ up, None
        grad_down = (grad_low.t() @ _drop_out(x, ctx)).to(ctx.dtypes[0])
        grad_up = (grad_out.t() @ low).to(ctx.dtypes[1]) * ctx.scaling
        if ctx.needs_input_grad[0]:
            grad = grad_out @ weight
            if ctx.probability:
                _drop_out(grad_low @ down, ctx, added_to=grad)
            else:
                grad.addmm_(grad_low, down)
        return grad, None, None, grad_down, grad_up, None, None


def adapter_matrices(down: torch.Tensor, up: torch.Tensor, scaling: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Round an adapter's matrices to bf16, after scaling."""
    return down.bfloat16(), (up * scaling).bfloat16()


def _drop_out(x: torch.Tensor, ctx, added_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return x with the mask of the context, scaled as nn.Dropout does, or add it to a tensor."""
    if not ctx.probability:
        return x
    x = x.contiguous()
    out = torch.empty_like(x) if added_to is None else added_to
    call("dropout", x, x, out, x.numel(), ctx.seed, ctx.probability, int(added_to is not None))
    return out
