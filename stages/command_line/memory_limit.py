"""A limit on the memory of a process (`ulimit -v`): what a program that ran into it says.

Most libraries raise an error then. Others abort the process: Rust (tokenizers, safetensors) always, C++ in threads of
its own. So the program runs in a child process, and this one, which needs hardly any memory, says why the child ended.
"""

import os
import resource
import signal
import sys
from pathlib import Path

from stages.render.units import format_bytes
from stages.runtime import stopping
from stages.runtime.processes import end_with_parent
from stages.runtime.stage_lines import print_line

ABORTS = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS)  # a thread without room for its stack is a SIGSEGV


def run_in_child_if_limited(label: str) -> None:
    """Go on in a child process if memory is limited; the parent waits for its end and exits with its status.

    Call it before a thread is started. A child that its libraries aborted is one line and status 1.
    """
    limit_bytes = address_space_limit()
    if limit_bytes is None:
        return
    parent, child = os.getpid(), os.fork()
    if not child:
        os.setsid()  # a terminal's Ctrl-C then reaches it once, from the parent
        os.environ["RUST_BACKTRACE"] = "0"
        end_with_parent(parent)
        return
    for number in stopping.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, frame: os.kill(child, number))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if -status in ABORTS:
        print_line(f"{label}: error: out of memory, it seems: a library aborted ({signal.Signals(-status).name}), and "
                   f"this process may have {format_bytes(limit_bytes)} (ulimit -v): raise that limit, or take smaller "
                   f"batches; the same command continues")
        sys.exit(1)
    sys.exit(status if status >= 0 else 128 - status)


def address_space_limit() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is none."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


def near_memory_limit(share: float = 0.5) -> int | None:
    """Return the limit of this process's address space in bytes, if there is one and `share` of it was in use."""
    limit_bytes = address_space_limit()
    if limit_bytes is None:
        return None
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak_kib = next(int(line.split()[1]) for line in lines if line.startswith("VmPeak"))
    except (OSError, StopIteration):  # not Linux
        return limit_bytes
    return limit_bytes if 1024 * peak_kib >= share * limit_bytes else None
