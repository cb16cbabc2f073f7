"""Run a stage in several processes: start them, tell each which one it is, and let them agree on the folder.

The first process (rank 0) builds the artifact, as the only process does otherwise. The others compute their share of
the rows (stages/distributed) in a private copy of its folder, and log to files of their own. Started by `--processes N`
or by torchrun; this module never loads torch.

At a limit on the memory of a process (`ulimit -v`) most libraries raise an error. Others abort the process: Rust
(tokenizers, safetensors) always, C++ in threads of its own. So the only process is then started in the same way, and
its launcher, which needs hardly any memory, says why it ended.
"""

import ctypes
import importlib
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from stages.recipe.algorithms import ALGORITHMS
from stages.render.units import format_bytes
from stages.runtime import stopping
from stages.runtime.files import link_or_copy, read_last_lines

# What torchrun and launchers of MPI set. accelerate and Transformers would split the data again if they saw it.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK",
             "ROLE_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK",
             "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_SIZE", "MPI_LOCALRANKID")
LAUNCHER = "STAGE_LAUNCHER_PID"
# Stages that share their rows.
IN_SEVERAL_PROCESSES = ("base", "sft", "reward", "judge", *ALGORITHMS, "evaluate")
GROUP = "stages.distributed.group"  # imported by name, where there are several processes: it loads torch
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
MEMORY_BYTES = 2 << 30  # that must be free for each process, if their number is not given
DRIVER = Path("/proc/driver/nvidia/version")
GRACE_SECONDS = 15.0  # for the first process to say what went wrong, after another one has ended
POLL_SECONDS = 0.05
LINK_FROM_BYTES = 1 << 20
PR_SET_PDEATHSIG = 1
ABORTS = ("SIGABRT", "SIGSEGV", "SIGBUS")  # a thread without room for its stack is a SIGSEGV


@dataclass(frozen=True)
class Place:
    """Which process of how many this is, and where they meet."""

    rank: int = 0
    count: int = 1
    address: str = "127.0.0.1"
    port: int = 0
    hosts_store: bool = True  # otherwise torchrun does
    nodes: int = 1
    is_launched: bool = False  # by `launch`


_places = [Place()]


def place() -> Place:
    """Return the place of this process."""
    return _places[-1]


def is_main() -> bool:
    """Check whether this process is the only or the first one: the one that writes."""
    return place().rank == 0


def take_place() -> Place:
    """Take the place that the environment names, once, and remove it from there; set this process's GPU.

    Call it before torch is imported.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if launcher := os.environ.pop(LAUNCHER, None):
        _places.append(Place(is_launched=True))
        end_with_parent(int(launcher))  # it would keep a core for nothing
    if count > 1:
        _places.append(Place(
            int(os.environ["RANK"]), count, os.environ.get("MASTER_ADDR", "127.0.0.1"),
            int(os.environ.get("MASTER_PORT", "29500")),
            int(os.environ["RANK"]) == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
            int(os.environ.get("GROUP_WORLD_SIZE", "1")), is_launched=launcher is not None))
        _see_one_gpu(int(os.environ.get("LOCAL_RANK", "0")))
    for name in VARIABLES:
        os.environ.pop(name, None)
    return place()


def count_processes(stage: str, wanted: int | None, units: int, own: Place) -> int:
    """Return the number of processes to run in: that of `own`, if this is one of several.

    Args:
        wanted: None: on a CPU as many as there are cores, units and MEMORY_BYTES of free memory; else one.
        units: that a step of the stage can be shared in (stages/distributed/units.py).

    Raises ValueError for a stage that runs in one process, and for fewer than one.
    """
    if stage not in IN_SEVERAL_PROCESSES:
        if own.count > 1:
            raise ValueError(f"{stage} runs in one process, and was started as one of {own.count}: start it without "
                             f"torchrun")
        return 1
    if wanted is not None and wanted < 1:
        raise ValueError(f"--processes must be at least 1, not {wanted}")
    if own.count > 1:
        return own.count
    if wanted or has_gpu():
        return wanted or 1
    import psutil  # not where the number is given

    return max(1, min(stage_threads(), units, psutil.virtual_memory().available // MEMORY_BYTES))


def must_launch(count: int, own: Place) -> bool:
    """Check whether this process only launches those of the stage: several, or one at a limit on its memory."""
    return own.count == 1 and not own.is_launched and (count > 1 or address_space_limit() is not None)


def limit_threads(stage: str, units: int) -> None:
    """Let a process compute with one thread where processes share the units of a step: the number of threads changes
    the last bits of small matrix products, and so would the number of processes. Call it before torch is imported.
    """
    if stage in IN_SEVERAL_PROCESSES and units > 1 and not has_gpu():
        os.environ.update(dict.fromkeys(THREADS, "1"))


def has_gpu() -> bool:
    """Check whether this process sees a GPU, without torch."""
    return DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") != ""


def share_folder(folder: Path | None) -> Path | None:
    """Return the folder that the first process builds the artifact in; None: there is nothing to do."""
    if place().count == 1:
        return folder
    group = importlib.import_module(GROUP)
    group.start()
    shared = group.from_main(str(folder) if folder else None)
    return Path(shared) if shared else None


def wait_for_all() -> None:
    """Wait until every process is here."""
    if place().count > 1:
        sys.modules[GROUP].from_main(None)


def name_lost_process(error: BaseException) -> BaseException:
    """Return the error, or one that says which process was lost, if that is its cause."""
    return sys.modules[GROUP].name_lost_process(error) if GROUP in sys.modules else error


def report_failure(message: str) -> None:
    """Tell the other processes, if this one has met them, why it ends."""
    if GROUP in sys.modules:
        sys.modules[GROUP].report_failure(" ".join(message.split()))


def launch(count: int, command: list[str], label: str, logs: list[Path]) -> int:
    """Run a Python command in `count` processes; return the exit status of the first one.

    If one ends with an error, all end, and one line says which. logs: of every process, for its error.
    """
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]  # a free one
    environment = os.environ | {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                                LAUNCHER: str(os.getpid()), "RUST_BACKTRACE": "0"}
    if count > 1:
        environment |= dict.fromkeys(THREADS, str(max(1, stage_threads() // count)))
    children = [subprocess.Popen([sys.executable, *command],
                                 env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                                 start_new_session=True)  # a terminal's Ctrl-C then reaches them once, from here
                for rank in range(count)]
    first = None
    try:
        first = _wait_for_end(children)
    except stopping.Stopped as stop:  # the stage may save a checkpoint first
        for child in children:
            child.send_signal(stop.signal)
        children[0].wait()
    finally:
        _end_all(children)
    status = children[0].returncode
    if first is not None and status < 0:  # otherwise the first process has said it, or all is done
        print(f"{label}: error: {_describe_end(first, children[first].returncode, count, logs[first])}",
              file=sys.stderr, flush=True)
        return 1
    return status if status >= 0 else 128 - status


@contextmanager
def private_copy(folder: Path, rank: int) -> Iterator[Path]:
    """Yield a copy of an unfinished artifact for a process that does not write it; it is deleted at the end.

    Large files and checkpoints are hard links: nobody changes them, and deleting a link deletes no file.
    """
    def copy_or_link(source: str, target: str) -> None:
        (link_or_copy if os.path.getsize(source) >= LINK_FROM_BYTES else shutil.copy2)(Path(source), Path(target))

    copy = folder.with_name(f".{folder.name}.rank-{rank}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy, copy_function=copy_or_link)
    try:
        yield copy
    finally:
        shutil.rmtree(copy, ignore_errors=True)


def remove_private_copies(folder: Path) -> None:
    """Delete the copies that killed processes have left."""
    for copy in folder.parent.glob(f".{folder.name}.rank-*"):
        shutil.rmtree(copy, ignore_errors=True)


def rank_log(out: Path, rank: int) -> Path:
    """Return the file that the process `rank` of the stage that makes `out` logs to."""
    return out.parent / "logs" / f"{out.name}.rank-{rank}.log"


def log_to_file(path: Path) -> None:
    """Send everything that this process prints, libraries included, to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)


def _wait_for_end(children: list[subprocess.Popen]) -> int | None:
    """Wait until all processes have ended, or one with an error, and return its rank.

    The first process then has GRACE_SECONDS to say what went wrong; if it is done, so has everyone.
    """
    failed, deadline = None, None
    while True:
        statuses = [child.poll() for child in children]
        if failed is None:
            failed = next((rank for rank, status in enumerate(statuses) if status), None)
        if deadline is None and (failed is not None or statuses[0] == 0):
            deadline = time.monotonic() + GRACE_SECONDS
        if statuses[0] or None not in statuses or (deadline is not None and time.monotonic() > deadline):
            return failed
        time.sleep(POLL_SECONDS)


def _end_all(children: list[subprocess.Popen]) -> None:
    for child in children:
        child.terminate()
    for child in children:
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        child.kill()  # nothing, if it has ended
        child.wait()


def _describe_end(rank: int, status: int, count: int, log: Path) -> str:
    if status < 0:
        name, limit_bytes = signal.Signals(-status).name, address_space_limit()
        if limit_bytes and name in ABORTS:
            return (f"out of memory, it seems: a library aborted ({name}), and this process may have "
                    f"{format_bytes(limit_bytes)} (ulimit -v): raise that limit, or take smaller batches; the same "
                    f"command continues")
        cause = " (as happens when memory runs out)" if name in ("SIGKILL", "SIGABRT") else ""
        return f"the process of rank {rank}, one of {count}, was ended by {name}{cause}; the same command continues"
    last_line = next(reversed(read_last_lines(log)), f"exit status {status}")
    return f"the process of rank {rank}, one of {count}, failed: {last_line} ({log})"


def stage_threads() -> int:
    """Return the threads that the stage may use: Snakemake sets the variable to those of the rule."""
    given = re.match(r"\d+", os.environ.get("OMP_NUM_THREADS", ""))  # OpenMP also takes a list, by level: 4,2
    return int(given[0]) if given else len(os.sched_getaffinity(0))


def _see_one_gpu(local_rank: int) -> None:
    """Let this process see its own GPU alone: libraries take the first one that they see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible is not None else list(map(str, range(local_rank + 1)))
    if local_rank < len(names):
        os.environ["CUDA_VISIBLE_DEVICES"] = names[local_rank]


def address_space_limit() -> int | None:
    """Return the limit of this process's address space in bytes; None if there is none."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit_bytes == resource.RLIM_INFINITY else limit_bytes


def end_with_parent(parent: int) -> None:
    """Have the kernel end this process when its parent, of this id, ends; end it now if that has happened already."""
    with suppress(OSError, AttributeError, TypeError):  # not Linux
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
