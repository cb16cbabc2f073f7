"""Bind the kernels by ctypes: argument types, and the choice of the function for a dtype."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from stages.modeling.cpu_kernels.build import load_library

SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class View(Structure):
    """A tensor [tokens, heads, W]; strides in values."""

    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


# One letter per argument: View, pointer, integer, float.
KINDS = {"V": View, "p": c_void_p, "i": c_int64, "f": c_float}
SIGNATURES = {
    "attend_forward": "VVVVppipi",
    "attend_backward": "VVVVppiVVVpi",
    "decode": "VVpppipi",
    "append_key_value": "VVpppiiii",
    "rms_norm": "ppppiif",
    "rms_norm_backward": "pppppii",
    "swiglu": "pppi",
    "swiglu_backward": "pppppi",
    "apply_rotary": "VppViiii",
    "log_softmax": "pppii",
    "dropout": "ppiifi",
    "pack_linear": "ppii",
    "linear": "pppii",
}


def views(*tensors: torch.Tensor) -> list[View]:
    """Describe tensors [tokens, heads, W] to the kernels."""
    return [View(x.data_ptr(), x.stride(0), x.stride(1)) for x in tensors]


def call(name: str, like: torch.Tensor, *arguments) -> None:
    """Call the kernel `name` for the dtype of `like`, on as many threads as torch uses; a tensor passes its address."""
    plain = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    _kernel(name, like.dtype)(*plain, torch.get_num_threads())


def apply(function: type[torch.autograd.Function], *arguments) -> torch.Tensor:
    """Apply an autograd function, directly where no gradient is recorded: decoding calls small kernels often."""
    if torch.is_grad_enabled():
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


class _NoContext:
    """Take the place of an autograd function's context, and save nothing."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        """Do nothing."""


@cache
def _kernel(name: str, dtype: torch.dtype) -> Callable:
    function = getattr(load_library(), f"{name}_{SUFFIXES[dtype]}")
    function.argtypes, function.restype = [*(KINDS[letter] for letter in SIGNATURES[name]), c_int], None
    return function
