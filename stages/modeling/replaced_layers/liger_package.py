"""Load the functions of liger-kernel, an optional package, and record the classes that compute with them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from stages.runtime.stage_lines import print_line

DEVICE = "cuda"
DTYPES = (torch.float32, torch.bfloat16)
REPLACED: set[str] = set()  # names of this process's classes that compute with the kernels
INSTALL = "pip install liger-kernel==0.8.5"


@dataclass(frozen=True)
class LigerFunctions:
    """Liger's functions of tensors.

    rms_norm(states, weight, epsilon, offset, casting, in_place); swiglu(gate, up); geglu(gate, up), with GELU by tanh.
    """

    rms_norm: Callable
    swiglu: Callable
    geglu: Callable


def load_functions() -> LigerFunctions | None:
    """Import liger-kernel; None where that is impossible."""
    return _load()[0]


def supports(*tensors: torch.Tensor) -> bool:
    """Check whether the kernels can process these tensors; never while torch.compile traces."""
    known = all(x.device.type == DEVICE and x.dtype in DTYPES for x in tensors)
    return known and not torch.compiler.is_compiling()


def status() -> str:
    """Describe what computes with the kernels in this process: class names, 'none' with the reason, or 'off'."""
    if not _load.cache_info().currsize:
        return "off"
    functions, reason = _load()
    if functions is None:
        return f"none: {reason}"
    return ", ".join(sorted(REPLACED)) or "none: no layer of these models"


def log(text: str) -> None:
    """Print a line about the kernels."""
    print_line(f"liger_kernels: {text}")


@cache
def _load() -> tuple[LigerFunctions | None, str]:
    """Return the functions, or None and the reason, which is also logged, once."""
    try:
        from liger_kernel.transformers import functional
        return LigerFunctions(functional.liger_rms_norm, functional.liger_swiglu, functional.liger_geglu), ""
    except ModuleNotFoundError as error:
        reason = f"{error.name} is not installed: {INSTALL}"
    except Exception as error:  # of a package for another machine or version, any
        reason = f"liger-kernel cannot be imported: {describe_error(error)}"
    log(f"none, torch's own operations are slower: {reason}")
    return None, reason


def describe_error(error: Exception) -> str:
    """Return an error's type and first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
