"""How Python's values reach the kernels."""

from collections.abc import Callable
from ctypes import Structure, c_float, c_int, c_int64, c_void_p
from functools import cache

import torch

from stages.modeling.cpu_kernels.build import library

SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class View(Structure):
    """[tokens, heads, W]; strides in values."""

    _fields_ = [("data", c_void_p), ("token", c_int64), ("head", c_int64)]


# By the first letters of what a kernel takes: View, pointer, integer, float.
KINDS = {"V": View, "p": c_void_p, "i": c_int64, "f": c_float}
SIGNATURES = {
    "attend_forward": "VVVVppipi",
    "attend_backward": "VVVVppiVVVpi",
    "attend_newest": "VVpppipi",
    "append_newest": "VVpppiiii",
    "norm": "ppppiif",
    "norm_slopes": "pppppii",
    "gated": "pppi",
    "gated_slopes": "pppppi",
    "turn": "VppViiii",
    "softmax": "pppii",
}


def views(*tensors: torch.Tensor) -> list[View]:
    return [View(x.data_ptr(), x.stride(0), x.stride(1)) for x in tensors]


def call(name: str, like: torch.Tensor, *arguments) -> None:
    """Call the kernel `name` for `like`'s type, on as many threads as torch uses; a tensor stands for its address."""
    plain = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
    _kernel(name, like.dtype)(*plain, torch.get_num_threads())


@cache
def _kernel(name: str, dtype: torch.dtype) -> Callable:
    found = getattr(library(), f"{name}_{SUFFIXES[dtype]}")
    found.argtypes, found.restype = [*(KINDS[letter] for letter in SIGNATURES[name]), c_int], None
    return found
