"""Compile, load and call the kernels: once per machine, in two seconds, they are compiled into the user's cache folder.

The compiler is $CXX, or the first of COMPILERS. Without one, torch's own operations compute the same, more slowly.
"""

import fcntl
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import CDLL, Structure, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from stages.runtime.files import atomic_path, hash_file, write_text
from stages.runtime.stage_lines import print_line

FOLDER = Path(__file__).parent
SOURCES = tuple(
    FOLDER / name
    for name in ("attention.cpp", "decode.cpp", "dropout.cpp", "layers.cpp", "linear.cpp", "softmax.cpp"))
HEADERS = tuple(FOLDER / name for name in ("matmul.h", "row_ranges.h", "simd.h"))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
COMPILE_SECONDS = 120
SUFFIXES = {torch.float32: "fp32", torch.bfloat16: "bf16"}  # of a kernel's name


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


def load_library() -> CDLL | None:
    """Load the kernels, and compile them if necessary; None where that is impossible."""
    return _load()[0]


def status() -> str:
    """Describe what this process has loaded: 'off', 'none' with the reason, or the vectors' width and the compiler."""
    if not _load.cache_info().currsize:
        return "off"
    library, text = _load()
    return f"{32 * library.simd_width()}-bit vectors, {text}" if library else f"none: {text}"


def supports(*tensors: torch.Tensor) -> bool:
    """Check whether the kernels can process these tensors; never while torch.compile traces."""
    known = all(x.is_cpu and x.dtype in SUFFIXES for x in tensors)
    return known and not torch.compiler.is_compiling() and load_library() is not None


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


@cache
def _load() -> tuple[CDLL | None, str]:
    """Return the library and its compiler's version, or None and the reason, which is also logged, once."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    try:
        if compiler is None:
            raise OSError(f"no C++ compiler ({', '.join(COMPILERS)})")
        version = _run([compiler, "--version"])
        return CDLL(str(_compile(compiler, version))), version.decode(errors="replace").partition("\n")[0]
    except subprocess.CalledProcessError as error:
        reason = f"{compiler} failed: {_first_error(error)}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: there is no home folder
        reason = str(error)
    print_line(f"cpu_kernels: none, torch's own operations are slower: {reason}")
    return None, reason


def _compile(compiler: str, version: bytes) -> Path:
    """Compile the kernels for this processor, unless another process has; OSError or SubprocessError on failure."""
    texts = [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    parts = (*texts, version, " ".join(FLAGS).encode(), _processor().encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stackllama"
    library = folder / f"kernels-{digest}.so"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _is_private(folder):
        raise OSError(f"{folder} is a link, belongs to another user, or others can write to it: what is loaded from it "
                      f"runs as you. Make it yours (chmod 700), or set XDG_CACHE_HOME")
    with _lock(folder):  # processes that start together: the first one compiles
        if not _is_intact(library):
            start = time.monotonic()
            with atomic_path(library) as draft:
                _run([compiler, *FLAGS, "-o", str(draft), *map(str, SOURCES)])
                draft.chmod(0o700)
            write_text(_digest_file(library), hash_file(library))
            print_line(f"cpu_kernels: compiled by {compiler} in {time.monotonic() - start:.1f} s: {library}")
    return library


def _is_intact(library: Path) -> bool:
    """Check that a compiled file is ours, and has the digest that was written when it was compiled.

    Loading a shared object that is cut short kills the process (SIGBUS).
    """
    try:
        return _is_private(library) and _digest_file(library).read_text(encoding="utf-8") == hash_file(library)
    except (OSError, ValueError):
        return False


def _is_private(path: Path) -> bool:
    """Check that a path is no link, belongs to this user, and nobody else can write to it."""
    status = path.lstat()
    writable_by_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not writable_by_others


def _digest_file(library: Path) -> Path:
    return library.with_suffix(".sha256")


def _run(command: list[str]) -> bytes:
    return subprocess.run(command, capture_output=True, check=True, timeout=COMPILE_SECONDS).stdout


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on a folder; the kernel releases it if the process dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _first_error(failed: subprocess.CalledProcessError) -> str:
    lines = failed.stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), f"exit status {failed.returncode}")


def _processor() -> str:
    """Describe the processor that the code is compiled for: one home folder may serve several machines."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(kinds)])
