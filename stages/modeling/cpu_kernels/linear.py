"""Compute linear layers on a CPU: those in bf16, of a few rows, with packed weights (linear.cpp) while a model decodes;
those with a LoRA adapter, in fp32 and bf16, of any number of rows.

oneDNN packs a layer's weights at every call, which for 16 rows takes as long as the product. Within `packed_weights`
they are packed once. The results are those of a forward pass over many rows, such as an update's, to the bit; this is
compared for each size of matrix.

Shapes: N rows, I inputs, O outputs, R rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import Structure, addressof, c_int64, c_void_p
from functools import cache

import torch
from peft.tuners import lora
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stages.modeling.cpu_kernels.build import apply, call, load_library, supports
from stages.modeling.cpu_kernels.layers import subclass
from stages.modeling.torch_setup import product_dtype

MAX_ROWS = 64  # more rows are as fast by torch
MULTIPLE = 16  # outputs of a vector
UPDATE_ROWS = 2048  # tokens of a forward pass, about
MATRIX_UNIT, ALL = 0, 1 << 30  # the processor's (AMX) adds the inputs; all inputs are added one after the other
BLOCKS = (MATRIX_UNIT, ALL, 1024, 512, 768, 384, 256, 128, 64)  # inputs that oneDNN adds before it adds their sum


class _Packed(Structure):
    _fields_ = [("data", c_void_p), ("inputs", c_int64), ("block", c_int64)]


class _Layer(Structure):
    _fields_ = [("weight", _Packed), ("down", _Packed), ("up", _Packed), ("bias", c_void_p), ("low", c_void_p)]


@contextmanager
def packed_weights(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Let a model's bf16 linear layers compute few rows with packed weights, where the processor has bf16 products.

    The weights, which must not change within, take their memory once more.
    """
    changed, done = [], set()
    try:
        if enabled and load_library().has_bf16_products():
            for module in model.modules():
                if module not in done and (packed := _pack_layer(module)) is not None:
                    changed.append(module)
                    done.add(packed.layer)
                    module.forward = packed  # shadows the class's
        yield
    finally:
        for module in changed:
            del module.forward


class PackedLinear:
    """The forward of a linear layer, or of one with a LoRA adapter, that is given to `packed_weights`."""

    def __init__(self, module: nn.Module, layer: nn.Linear, adapter: str | None, matrices: list[torch.Tensor]):
        self.module, self.own, self.layer, self.adapter = module, module.forward, layer, adapter
        self.packed = [pack_matrix(matrix) for matrix in matrices]
        self.low = torch.empty(MAX_ROWS, len(matrices[1]) if adapter else 0, dtype=torch.bfloat16)
        described = (_Packed(packed.data_ptr(), inputs, summed_inputs(outputs, inputs))
                     for packed, (outputs, inputs) in zip(self.packed, (x.shape for x in matrices), strict=True))
        self.arguments = _Layer(*described)
        self.arguments.bias = None if layer.bias is None else layer.bias.data_ptr()
        self.arguments.low = self.low.data_ptr()

    def __call__(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Compute [..., O] from [..., I], as the module does."""
        rows = x.numel() // x.shape[-1]
        if (rows > MAX_ROWS or x.dtype != torch.bfloat16 or torch.is_grad_enabled() or args or kwargs
                or (self.adapter is not None and plain_adapter(self.module) != self.adapter)):
            return self.own(x, *args, **kwargs)
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self.layer.out_features)
        call("linear", x, x, addressof(self.arguments), out, rows, self.layer.out_features)
        return out


def _pack_layer(module: nn.Module) -> PackedLinear | None:
    """Pack a linear layer in bf16, plain or with a plain adapter that the kernels compute; None for other modules."""
    adapted = isinstance(module, KernelLoraLinear)
    layer, adapter = module.get_base_layer() if adapted else module, plain_adapter(module) if adapted else None
    if type(layer) is not nn.Linear or layer.weight.dtype != torch.bfloat16 or (adapted and adapter is None):
        return None
    matrices = [layer.weight]
    if adapted:
        matrices += adapter_matrices(
            module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter], torch.bfloat16)
    if any(outputs % MULTIPLE or inputs % 2 or summed_inputs(outputs, inputs) is None
           for outputs, inputs in (x.shape for x in matrices)):
        return None
    return PackedLinear(module, layer, adapter, matrices)


def pack_matrix(weight: torch.Tensor) -> torch.Tensor:
    """Copy a matrix [O, I] to the order in which the kernel reads it."""
    weight = weight.detach().contiguous()
    packed = torch.empty_like(weight)
    call("pack_linear", weight, weight, packed, *weight.shape)
    return packed


@cache
def summed_inputs(outputs: int, inputs: int) -> int | None:
    """Return how many inputs oneDNN adds before it adds their sum to the others'; None if no number gives its bits.

    The products compared cancel out: what is left is rounding, which another order would change.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, inputs // 2, generator=generator).bfloat16() for count in (MULTIPLE, outputs))
    order = torch.randperm(inputs, generator=generator)
    x, weight = torch.cat([x, x], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    # Of the rows of an update: with fewer, oneDNN may add in another order.
    expected = functional.linear(x.repeat(UPDATE_ROWS // MULTIPLE, 1), weight)[:MULTIPLE]
    packed, out = pack_matrix(weight), torch.empty_like(expected)
    has_matrix_unit = load_library().has_matrix_unit()
    for block in (block for block in BLOCKS if block != MATRIX_UNIT or has_matrix_unit):
        layer = _Layer(_Packed(packed.data_ptr(), inputs, block))
        call("linear", x, x, addressof(layer), out, len(x), outputs)
        if torch.equal(out, expected):
            return block
    return None


def replace_lora_layers(model: nn.Module) -> None:
    """Let the model's adapted linear layers compute by `LoraProduct` wherever one plain adapter is active."""
    for module in model.modules():
        if type(module) is lora.Linear and type(module.get_base_layer()) is nn.Linear:
            module.__class__ = subclass(lora.Linear, KernelLoraLinear)


class KernelLoraLinear:
    """Mixin for PEFT's adapted linear layer: six products, and dropout by a kernel (dropout.cpp).

    PEFT's own forward would convert a bf16 layer's inputs to fp32, multiply there, and draw a mask for each layer in
    one thread. Here the adapter's product is added to the layer's own in place, and a bf16 layer's adapter, whose
    weights stay fp32, is multiplied in bf16 as under autocast. The dropout of PEFT's adapter, a mask for each layer, is
    computed from a seed, and again in the backward pass. Under autocast PEFT's forward stays.
    """

    def forward(self, x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Compute [..., O] from [..., I] by `LoraProduct` where it can, else as PEFT does."""
        layer = self.get_base_layer()
        if args or kwargs or not x.dtype == layer.weight.dtype == product_dtype(x) or not supports(x):
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
    """x W' + bias + scaling * dropout(x) A' B' for x [N, I] and frozen W [O, I] of one dtype; A [R, I] and B [O, R]
    learn.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, down, up, scaling: float, probability: float):
        ctx.seed = int(torch.randint(1 << 62, ())) if probability else 0
        ctx.scaling, ctx.probability, ctx.dtypes = scaling, probability, (down.dtype, up.dtype)
        down, up = adapter_matrices(down, up, scaling, weight.dtype)
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


def adapter_matrices(
    down: torch.Tensor, up: torch.Tensor, scaling: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round an adapter's matrices to `dtype`, after scaling."""
    return down.to(dtype), (up * scaling).to(dtype)


def _drop_out(x: torch.Tensor, ctx, added_to: torch.Tensor | None = None) -> torch.Tensor:
    """Return x with the mask of the context, scaled as nn.Dropout does, or add it to a tensor."""
    if not ctx.probability:
        return x
    x = x.contiguous()
    out = torch.empty_like(x) if added_to is None else added_to
    call("dropout", x, x, out, x.numel(), ctx.seed, ctx.probability, int(added_to is not None))
    return out
