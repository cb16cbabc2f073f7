"""Run checks in several processes, forks of one that has imported the libraries and the stages: that takes longer.

A worker calls `run_in_ranks`; a test starts it with `start_worker`.
"""

import json
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path

from safetensors.torch import load_file, save_file

from stages.distributed import group
from stages.modeling import torch_setup
from stages.runtime import processes
from tests.helpers.library_forks import ROOT, LibraryForks

LIMIT_SECONDS = 480
Checks = Callable[[Path], tuple[dict, dict]]


def start_worker(forks: LibraryForks, module: str, folders: dict[int, Path]) -> dict[int, list[tuple[dict, dict]]]:
    """Run a worker once for each number of processes; return facts and tensors of the first and the last process."""
    words = [word for count, folder in folders.items() for word in (str(folder), str(count))]
    worker = forks.start([module, *words], ROOT, os.environ | {"STAGE_LIMIT_SECONDS": "120"})
    _, said = worker.communicate(LIMIT_SECONDS)
    assert worker.returncode == 0, said[-3000:]
    return {count: [(json.loads((folder / f"{rank}.json").read_text()), load_file(folder / f"{rank}.safetensors"))
                    for rank in (0, count - 1)] for count, folder in folders.items()}


def run_in_ranks(checks: Checks, words: list[str]) -> int:
    """Run the checks for each FOLDER PROCESSES of the words; return how many processes failed.

    A process saves its facts and tensors as FOLDER/<rank>.json and .safetensors, and may use FOLDER/files-<rank>.
    """
    failed = 0
    for folder, count in zip(words[::2], map(int, words[1::2]), strict=True):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        children = [_fork_rank(checks, Path(folder), rank, count, port) for rank in range(count)]
        failed += sum(os.waitpid(child, 0)[1] != 0 for child in children)
    return failed


def _fork_rank(checks: Checks, folder: Path, rank: int, count: int, port: int) -> int:
    """Run the checks in a fork of this process, as one of several; return its id."""
    parent, child = os.getpid(), os.fork()
    if child:
        return child
    try:
        processes.end_with_parent(parent)
        os.environ |= {"WORLD_SIZE": str(count), "RANK": str(rank), "LOCAL_RANK": str(rank),
                       "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        processes.take_place()
        torch_setup.prepare()
        group.start()
        facts, tensors = checks(folder / f"files-{rank}")
        (folder / f"{rank}.json").write_text(json.dumps(facts))
        save_file(tensors, folder / f"{rank}.safetensors")
        group.stop()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
