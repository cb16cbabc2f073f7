"""A package with the functions that liger-kernel has, in torch's operations; and what lets Triton's interpreter run
the real one.
"""

import sys
from types import ModuleType

import torch
from torch.nn import functional

OPS = {"liger_rms_norm": "rms_norm", "liger_swiglu": "swiglu", "liger_geglu": "geglu"}


class Liger:
    """The functions, with the names of those that were called in `called`."""

    def __init__(self):
        self.called = []

    def liger_rms_norm(self, X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
        self.called.append("rms_norm")
        assert not in_place and X.dtype == W.dtype
        states = X.float() * torch.rsqrt(X.float().square().mean(-1, keepdim=True) + eps)
        if casting_mode == "llama":
            return (offset + W) * states.to(X.dtype)
        return ((offset + W.float()) * states).to(X.dtype)

    def liger_swiglu(self, a, b):
        self.called.append("swiglu")
        return functional.silu(a) * b

    def liger_geglu(self, a, b):
        self.called.append("geglu")
        return functional.gelu(a, approximate="tanh") * b


def install(monkeypatch, liger: Liger) -> None:
    """Let `from liger_kernel.transformers import functional` import these functions."""
    modules = {name: ModuleType(name) for name in
               ("liger_kernel", "liger_kernel.transformers", "liger_kernel.transformers.functional")}
    modules["liger_kernel.transformers"].functional = modules["liger_kernel.transformers.functional"]
    for name in OPS:
        setattr(modules["liger_kernel.transformers.functional"], name, getattr(liger, name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def complete_interpreter(monkeypatch) -> None:
    """Let Triton's interpreter run Liger's kernels: it passes numbers as Python's, and lacks NVIDIA's libdevice."""
    import numpy as np
    import triton.language as tl
    from liger_kernel.ops import geglu, rms_norm
    from triton.runtime import interpreter

    own = interpreter._implicit_cvt

    def convert(value):
        if isinstance(value, float):
            return tl.tensor(interpreter.TensorHandle(np.array([value], np.float32), tl.float32), tl.float32)
        return own(value)

    monkeypatch.setattr(interpreter, "_implicit_cvt", convert)
    monkeypatch.setattr(rms_norm, "rsqrt", lambda x: tl.rsqrt(x))
    monkeypatch.setattr(geglu, "tanh", lambda x: 2 * tl.sigmoid(2 * x) - 1)
