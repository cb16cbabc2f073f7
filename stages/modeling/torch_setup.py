"""The machine's fast routes, taken once at the start, the same in every run on a machine: results stay reproducible."""

import ctypes

import torch

_LARGEST_FROM_HEAP_BYTES = 32 << 20  # the most that glibc takes
_KEPT_BYTES = 1 << 30


def prepare() -> None:
    """Send CPU products of fp32 matrices through oneDNN where that is exact, and keep freed memory for the next tensor.

    'medium' lets oneDNN multiply fp32 by way of bf16, which it does with AMX alone: without AMX it multiplies in fp32,
    at 2.2 times MKL's rate on an AMD core and at MKL's on an Intel one. A GPU's products are not touched.
    """
    if not torch.cuda.is_available() and torch.backends.mkldnn.is_available() and not _has_amx():
        torch.set_float32_matmul_precision("medium")
    _keep_freed_memory()


def _has_amx() -> bool:
    """True where it cannot be told."""
    return bool(torch.cpu.get_capabilities().get("amx_tile", True))


def _keep_freed_memory() -> None:
    """glibc maps each large tensor anew, and the kernel zeroes its pages: a tenth of an update's time on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, _LARGEST_FROM_HEAP_BYTES)
    mallopt(trim_threshold, _KEPT_BYTES)
