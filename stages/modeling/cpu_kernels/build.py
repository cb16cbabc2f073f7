"""The compiled kernels: made once on each machine by its C++ compiler ($CXX, or one of COMPILERS), in two seconds, and
kept in the user's cache folder.

Without a compiler, or where it fails, everything works by torch's own operations; only slower.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fopenmp", "-shared", "-fPIC")
COMPILE_SECONDS = 120
DTYPES = (torch.float32, torch.bfloat16)


def library() -> ctypes.CDLL | None:
    """The kernels; None where there are none."""
    return _loaded()[0]


def route() -> str:
    """For people: what compiled the kernels, or why there are none."""
    return _loaded()[1]


def takes(*tensors: torch.Tensor) -> bool:
    """Whether there are kernels, and for these tensors; not while torch.compile looks on."""
    known = all(x.device.type == "cpu" and x.dtype in DTYPES for x in tensors)
    return known and not torch.compiler.is_compiling() and library() is not None


@cache
def _loaded() -> tuple[ctypes.CDLL | None, str]:
    """The kernels or None, and how that came; without them one line says why, once."""
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    try:
        if compiler is None:
            raise OSError(f"no C++ compiler here ({', '.join(COMPILERS)})")
        return ctypes.CDLL(str(_compiled(compiler))), f"compiled by {compiler}"
    except subprocess.CalledProcessError as error:
        reason = f"{compiler} failed: {_first_error(error)}"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:  # RuntimeError: there is no home folder
        reason = str(error)
    print(f"no kernels for this CPU, torch's own operations are slower: {reason}", file=sys.stderr, flush=True)
    return None, reason


def _first_error(failed: subprocess.CalledProcessError) -> str:
    lines = failed.stderr.decode(errors="replace").splitlines()
    return next((line for line in lines if "error" in line), f"exit status {failed.returncode}")


def _compiled(compiler: str) -> Path:
    """The kernels for this machine's processor, made unless they are there; OSError or SubprocessError if not."""
    version = subprocess.run([compiler, "--version"], capture_output=True, check=True, timeout=COMPILE_SECONDS).stdout
    texts = [file.read_bytes() for file in (*SOURCES, *HEADERS)]
    parts = (*texts, version, " ".join(FLAGS).encode(), _processor().encode())
    digest = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stackllama"
    kernels = folder / f"kernels-{digest}.so"
    if not kernels.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryDirectory(dir=folder) as made:
            new = Path(made) / kernels.name
            subprocess.run([compiler, *FLAGS, "-o", new, *SOURCES], capture_output=True, check=True,
                           timeout=COMPILE_SECONDS)
            new.replace(kernels)
    return kernels


def _processor() -> str:
    """What the code is compiled for: a home folder may serve many machines."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text().splitlines() if known.exists() else []
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join([platform.machine(), platform.processor(), *sorted(kinds)])
