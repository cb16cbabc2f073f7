"""Set up torch and the model libraries for a training process: matmul precision, determinism on a GPU, allocator, log
levels and warnings.

A program calls `prepare` once, before it loads a model. Importing this module changes nothing.
"""

import ctypes
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from stages.runtime.environment import silence_missing_kernel
from stages.runtime.stage_lines import print_line

_LARGEST_FROM_HEAP_BYTES = 32 << 20  # glibc's maximum
_KEPT_BYTES = 1 << 30


def prepare() -> None:
    """Set matmul precision, allocator thresholds, log levels and warning filters of this process. Idempotent.

    Says which GPU is used where there are several.
    """
    if torch.cuda.is_available():
        _set_up_gpu()
    _set_matmul_precision()
    _keep_freed_memory()
    _silence_libraries()
    if (count := torch.cuda.device_count()) > 1:
        print_line(f"{count} GPUs are visible, and a stage computes on one, the first: CUDA_VISIBLE_DEVICES chooses "
                   f"another")


def without_autocast(x: torch.Tensor) -> torch.autocast:
    """Return the context in which `x` is computed in its own precision."""
    return torch.autocast(x.device.type, enabled=False)


def product_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which matrix products of `x` are computed: autocast's, or its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


@contextmanager
def allow_nondeterministic() -> Iterator[None]:
    """Let torch call kernels for a GPU that it does not call deterministic, which it otherwise refuses."""
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True)


def _set_up_gpu() -> None:
    """Make a GPU's results repeat bit for bit, as a resumed run's must, and its products as exact as their precision.

    fp32 is fp32: TF32 stays off, so that log-probabilities agree with a CPU's. Precision 'mixed' or 'bf16' uses the
    tensor cores. Products in bf16 are summed in fp32 throughout.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is deterministic with a fixed workspace only
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.use_deterministic_algorithms(True)  # not warn_only: attention would then sum its gradients in any order
    torch.utils.deterministic.fill_uninitialized_memory = False  # a help in debugging that costs time


def _silence_libraries() -> None:
    """Turn off the libraries' progress bars and load reports: stages show progress and check weights themselves."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets' own switch needs its import, 85 MB
    disable_progress_bar()
    set_verbosity_error()
    # PEFT and TrainingArguments use names that Transformers has renamed.
    warnings.filterwarnings("ignore", message=r".*activation_checkpointing", category=FutureWarning)
    silence_missing_kernel()  # where no command has, before it imported this


def _set_matmul_precision() -> None:
    """Multiply fp32 matrices on a CPU with oneDNN, where that is exact.

    'medium' lets oneDNN multiply in bf16, which it does only with AMX. Without AMX it multiplies in fp32, at 2.2 times
    MKL's rate on an AMD core and at MKL's rate on an Intel one.
    """
    may_have_amx = torch.cpu.get_capabilities().get("amx_tile", True)
    if not torch.cuda.is_available() and torch.backends.mkldnn.is_available() and not may_have_amx:
        torch.set_float32_matmul_precision("medium")


def _keep_freed_memory() -> None:
    """Let glibc reuse freed memory. By default it maps every large tensor anew, and the kernel zeroes its pages.

    That was a tenth of an update's time on a CPU.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):  # another C library
        return
    trim_threshold, mmap_threshold = -1, -3
    mallopt(mmap_threshold, _LARGEST_FROM_HEAP_BYTES)
    mallopt(trim_threshold, _KEPT_BYTES)
