"""Compare a module of Transformers with one that may take its place in a model instance.

Equal bytecode tells a formula from others under the same names, some of which scale, clamp, or drop out in training
alone; equal results on random inputs tell whether equal code calls the same functions.
"""

from collections.abc import Callable
from functools import cache

import torch

TOLERANCE = 0.02  # of the largest value: above rounding, also in bf16 and int8, and below another formula


def bytecode(function: Callable | None) -> tuple | None:
    """Return what a function does and the names it uses; None if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return code and (code.co_code, code.co_names, code.co_varnames)


def relative_difference(expected: torch.Tensor, result: torch.Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    difference, size = (expected - result).abs().max(), expected.abs().max()
    return float(difference / size) if difference else 0.0


def random_states(*shape: int) -> torch.Tensor:
    """Draw any inputs, cosines and sines too."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@cache
def subclass(kind: type, mixin: type) -> type:
    """Return the class with the mixin's forward, under the same name; `kind` itself stays as it is."""
    return type(kind.__name__, (mixin, kind), {})
