"""What a stage runs on: its description for the manifest, and what fits a computation to it."""

import ctypes
import dataclasses
import gc
import hashlib
import importlib.metadata
import logging
import os
import platform
import resource
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from stages.recipe import schema
from stages.runtime import processes
from stages.runtime.files import DIGEST_CHARACTERS, hash_file
from stages.runtime.stage_lines import print_line

SOURCES = (".py", ".cpp", ".h")
KERNEL_LOGGER, KERNEL_RECOMMENDATION = "bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward from"
BF16_PRODUCTS = ("avx512_bf16", "amx_bf16", "bf16")  # torch's names, and the kernel's: x86 twice, Arm
PRECISIONS = ("precision", "check_precision")  # settings
PACKAGES = ("torch", "transformers", "trl", "peft", "datasets", "bitsandbytes", "accelerate", "snakemake",
            "markdownify", "tokenizers", "pyarrow", "lxml", "numpy")


def let_idle_threads_sleep() -> None:
    """Set OMP_WAIT_POLICY, unless the user has; call it before torch is imported, OpenMP reads it only then.

    With the default (spinning), a busy neighbour makes a stage of two threads several times slower.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def has_bf16_products() -> bool:
    """Check whether the device of this process multiplies bf16 matrices in hardware; imports torch.

    A CPU that emulates them takes some 50 times as long as in fp32.
    """
    import torch

    return torch.cuda.is_available() or any(torch.cpu.get_capabilities().get(name) for name in BF16_PRODUCTS)


def processor_has_bf16_products() -> bool:
    """Check whether the kernel lists bf16 products among the processor's flags; imports no torch."""
    try:
        words = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    except OSError:  # another system
        return False
    return not set(BF16_PRODUCTS).isdisjoint(words)


def fit_precision(config: object) -> object:
    """Return a section with fp32 in place of 'mixed' and 'bf16' where bf16 is emulated, and print what is replaced.

    The recipe, and with it the request of the artifact, keep the precision that was asked for, as for any other
    rounding of a processor.
    """
    emulated = list_bf16(config) if dataclasses.is_dataclass(config) else {}
    if not emulated or has_bf16_products():
        return config
    for name, precision in emulated.items():
        print_line(f"{name} {precision} is computed in fp32: this processor emulates bf16 products, which takes some "
                   f"50 times as long")
    return to_fp32(config)


def list_bf16(config: object) -> dict[str, str]:
    """Return the precisions of a section, or of a recipe, that multiply in bf16, by their dotted names."""
    return {name: value for name, field, value in schema.list_fields(config)
            if field.name in PRECISIONS and value in ("mixed", "bf16")}


def to_fp32(config: object) -> object:
    """Return a section, or a recipe, with fp32 in place of 'mixed' and 'bf16'."""
    return schema.override(config, schema.nest(dict.fromkeys(list_bf16(config), "fp32")), "processor")


def return_freed_memory() -> None:
    """Collect garbage and return freed memory to the system, which glibc would keep (modeling.torch_setup).

    Call it where a whole model has been freed and another one is loaded next.
    """
    gc.collect()
    with suppress(OSError, AttributeError, TypeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def silence_missing_kernel() -> None:
    """Leave out one line of bitsandbytes, which recommends an optional kernel at every import, quantised or not.

    Call it before torch is imported, as bitsandbytes then is, too.
    """
    logging.getLogger(KERNEL_LOGGER).addFilter(_is_not_recommendation)


def _is_not_recommendation(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(KERNEL_RECOMMENDATION)


def describe_environment() -> dict:
    """Return what a manifest records of this process and machine; peak memory in MiB, children included."""
    torch = sys.modules.get("torch")
    gpu = torch.cuda.get_device_name() if torch is not None and torch.cuda.is_available() else None
    peak_kib = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    memory = sys.modules.get("stages.training.memory")  # it resets the process's peak to measure phases
    peak_kib = peak_kib if memory is None else max(peak_kib, memory.peak_bytes() // 1024)
    build = sys.modules.get("stages.modeling.cpu_kernels.build")
    kernels = {"cpu_kernels": build.status()} if build else {}
    return {"peak_memory_mib": round(peak_kib / 1024), "device": gpu or f"cpu ({platform.machine()})",
            **kernels, "threads": torch.get_num_threads() if torch is not None else 1, **_describe_processes(),
            "python": platform.python_version(),
            "versions": {name: version for name in PACKAGES if (version := _version(name))}, "commit": _commit()}


def _describe_processes() -> dict:
    """Return the numbers of processes and nodes; of several, the seconds that the first one spent in their transfers.
    """
    this_process, group = processes.place(), sys.modules.get("stages.distributed.group")
    seconds = {"transfer_seconds": round(group.transfer_seconds(), 2)} if this_process.count > 1 and group else {}
    return {"processes": this_process.count, "nodes": this_process.nodes, **seconds}


def digest_code() -> str:
    """Compute the abbreviated SHA-256 of this project's sources, with their names."""
    root = Path(__file__).parents[1]
    sources = sorted(path for path in root.rglob("*") if path.suffix in SOURCES)
    lines = [f"{path.relative_to(root)} {hash_file(path)}" for path in sources]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:DIGEST_CHARACTERS]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    try:
        return subprocess.run(["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty",
                               "--abbrev=40"], capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
