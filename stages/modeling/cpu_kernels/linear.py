"""Compute bf16 linear layers of a few rows with packed weights (linear.cpp) while a model decodes.

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
from torch import nn
from torch.nn import functional

from stages.modeling.cpu_kernels.bindings import call
from stages.modeling.cpu_kernels.build import load_library
from stages.modeling.cpu_kernels.lora import KernelLoraLinear, adapter_matrices, plain_adapter

MAX_ROWS = 64  # more rows are as fast by torch
MULTIPLE = 16  # outputs of a vector
BLOCKS = (None, 1024, 512, 768, 384, 256, 128, 64)  # inputs that oneDNN adds before it adds their sum; None: all


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
            module.lora_A[adapter].weight, module.lora_B[adapter].weight, module.scaling[adapter])
    if any(outputs % MULTIPLE or inputs % 2 or not summed_inputs(outputs, inputs)
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
def summed_inputs(outputs: int, inputs: int) -> int:
    """Return how many inputs oneDNN adds before it adds their sum to the others'; 0 if no number gives its bits.

    The products compared cancel out: what is left is rounding, which another order would change.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(count, inputs // 2, generator=generator).bfloat16() for count in (MULTIPLE, outputs))
    order = torch.randperm(inputs, generator=generator)
    x, weight = torch.cat([x, x], 1)[:, order], torch.cat([weight, -weight], 1)[:, order]
    expected = functional.linear(x.repeat(20, 1), weight)[: len(x)]  # of many rows: few may be added in another order
    packed, out = pack_matrix(weight), torch.empty_like(expected)
    for block in BLOCKS:
        layer = _Layer(_Packed(packed.data_ptr(), inputs, block or inputs))
        call("linear", x, x, addressof(layer), out, len(x), outputs)
        if torch.equal(out, expected):
            return block or inputs
    return 0
