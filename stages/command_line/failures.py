"""Describe, in one line, a failure that the user or the machine is the cause of; save the traceback of any."""

import errno
import re
import shutil
import traceback
from pathlib import Path

from stages.artifacts import artifact
from stages.render.units import format_bytes
from stages.runtime.files import nearest_folder
from stages.runtime.processes import address_space_limit

MEMORY_WORDS = ("(?i)out of memory|not enough memory|(can't|cannot|unable to) allocate|bad_alloc|failed to map segment"
                "|can't start new thread|could not create a primitive")  # of torch, numpy, C++
# Without an errno: of Rust, as a bare Exception (tokenizers), and of numpy, as an OSError.
FULL_WORDS = "No space left on device|Disk quota exceeded|Not enough free space to write"
UNREPEATABLE_WORDS = "does not have a deterministic implementation"  # of torch, for a GPU (modeling/torch_setup.py)
MIN_FREE_BYTES = 1 << 20  # with less, an error of a library that names no cause is that of a full disk
TEXT_CHARACTERS = 200


def describe_failure(error: BaseException, out: Path) -> str | None:
    """Describe in one line what a user or the machine is the cause of; None for a mistake in this program."""
    text = " ".join(str(error).split())
    if isinstance(error, MemoryError) or re.search(MEMORY_WORDS, text):
        return f"out of memory: take smaller batches or microbatches, or a machine with more ({text[:TEXT_CHARACTERS]})"
    if UNREPEATABLE_WORDS in text:
        return (f"this base needs an operation whose results do not repeat on a GPU: put CUDA_VISIBLE_DEVICES= before "
                f"the command to compute on the CPU, or take another base ({text[:TEXT_CHARACTERS]})")
    folder = nearest_folder(out)
    free_bytes = shutil.disk_usage(folder).free
    is_of_safetensors = type(error).__name__ == "SafetensorError"  # by name: an import would delay every command
    storing = is_of_safetensors or isinstance(error, OSError | RuntimeError)
    is_full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or re.search(FULL_WORDS, text)
    if is_full or (storing and free_bytes < MIN_FREE_BYTES):
        file = getattr(error, "filename", None) or folder
        return (f"no space left on the disk of {file} (free: {format_bytes(free_bytes)}): make room, and the same "
                f"command continues")
    if is_of_safetensors:
        return f"a file of weights cannot be read or written: {text}"
    if isinstance(error, ValueError | OSError):
        return str(error)
    if limit_bytes := near_memory_limit():  # libraries then fail in words of many kinds
        return (f"out of memory, it seems: this process may have {format_bytes(limit_bytes)} (ulimit -v), and torch "
                f"alone takes several GB: raise that limit ({text[:TEXT_CHARACTERS]})")
    return None


def save_traceback(out: Path) -> str:
    """Write the traceback into the partial folder, and return the end of the error's line that says so."""
    file = out.with_name(out.name + artifact.PARTIAL) / artifact.TRACEBACK
    try:
        file.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:  # there is no such folder yet, or the disk is full
        return ""
    return f" (details: {file})"


def near_memory_limit() -> int | None:
    """Return the limit of this process's address space in bytes, if there is one and half of it was in use."""
    limit_bytes = address_space_limit()
    if limit_bytes is None:
        return None
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmPeak"))
    except (OSError, StopIteration):  # not Linux
        return limit_bytes
    return limit_bytes if 2 * 1024 * peak_kib >= limit_bytes else None
