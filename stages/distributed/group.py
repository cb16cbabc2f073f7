"""Join the processes of a run to one group: sums over all, results by rank, and which process is lost.

Control is replicated: every process runs the same program on the same data with the same random numbers. Each process
computes its own work units (units.py), and the results are summed or gathered, so that every process goes on with the
whole. All calls are collective: every process makes the same ones in the same order. With one process they return their
argument unchanged.
"""

import json
import os
import re
import time
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

from stages.runtime import processes

LIMIT_VARIABLE, LIMIT_SECONDS = "STAGE_LIMIT_SECONDS", 1800.0  # that a process waits for another one
ANSWER_SECONDS = 3.0  # for the others to answer that they lost someone, too
REPORT_SECONDS = 10.0  # for the first process to report an error of another one
CONNECTION_WORDS = "(?i)gloo|nccl|connection (closed|reset)"  # in torch's RuntimeErrors
_transfer_seconds = [0.0]
_stores: list[dist.Store] = []


class LostProcessError(ValueError):
    """A process has ended, failed, or not come within the limit; the message says which."""


def rank() -> int:
    """Return the number of this process, from 0."""
    return processes.place().rank


def world_size() -> int:
    """Return the number of processes."""
    return processes.place().count


def start() -> None:
    """Connect to the other processes; LostProcessError if they do not come within the limit."""
    place = processes.place()
    if place.count == 1 or dist.is_initialized():
        return
    limit = timedelta(seconds=float(os.environ.get(LIMIT_VARIABLE, LIMIT_SECONDS)))
    try:
        store = dist.TCPStore(place.address, place.port, place.count, place.hosts_store, limit)
        _stores.append(dist.PrefixStore(f"stage/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store))
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
                                store=_stores[-1], rank=place.rank, world_size=place.count, timeout=limit)
    except RuntimeError as error:
        raise LostProcessError(f"not all of the {place.count} processes came within {limit.total_seconds():g} s "
                               f"({' '.join(str(error).split())[:200]})") from None
    gpus = gather(torch.cuda.is_available())
    if len(set(gpus)) > 1:
        raise ValueError(f"{place.count} processes need a GPU each, and only {sum(gpus)} have one: give --processes "
                         f"{max(1, sum(gpus))}")


def stop() -> None:
    """Leave the group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def sum_tensor(x: torch.Tensor) -> torch.Tensor:
    """Sum a tensor over the processes, in place, and return it. Rows that a process did not compute are 0."""
    if world_size() > 1:
        _call(dist.all_reduce, x)
    return x


def max_tensor(x: torch.Tensor) -> torch.Tensor:
    """Take the maximum of a tensor over the processes, in place, and return it."""
    if world_size() > 1:
        _call(dist.all_reduce, x, dist.ReduceOp.MAX)
    return x


def any_process(flag: bool) -> bool:
    """Check whether the flag is set in any process."""
    return any_process_each([bool(flag)])[0]


def any_process_each(flags: list[bool]) -> list[bool]:
    """Check of each flag whether it is set in any process."""
    return sum_tensor(torch.tensor(flags, dtype=torch.long)).bool().tolist()


def gather_vectors(x: torch.Tensor, lengths: list[int]) -> list[torch.Tensor]:
    """Return the vector of every process, by rank: of one dtype, and of these lengths."""
    if world_size() == 1:
        return [x]
    if x.is_cuda:
        padded = torch.nn.functional.pad(x, (0, max(lengths) - len(x)))
        parts = [torch.empty_like(padded) for _ in lengths]
        _call(dist.all_gather, parts, padded)
    else:
        parts = [x.new_empty(length) for length in lengths]
        _call(_send_to_all, parts, x)
    return [part[:length] for part, length in zip(parts, lengths, strict=True)]


def gather(value) -> list:
    """Return the value of every process, by rank; values are what JSON can express (no pickle)."""
    if world_size() == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = [int(length) for length in gather_vectors(torch.tensor([len(data)]), [1] * world_size())]
    return [json.loads(bytes(part.tolist())) for part in gather_vectors(data, lengths)]


def from_main(value):
    """Return the value of the first process; those of others are ignored."""
    return gather(value if rank() == 0 else None)[0]


def report_failure(message: str) -> None:
    """Tell the other processes why this one ends; returns when the first one knows, or soon after."""
    if not _stores:
        return
    with suppress(RuntimeError):  # the store ends with the first process
        if rank() == 0:
            _stores[-1].set("reported", "1")
            return
        _stores[-1].set(f"error/{rank()}", message)
        stop()  # whoever waits for this process learns it now
        _stores[-1].wait(["reported"], timedelta(seconds=REPORT_SECONDS))


def name_lost_process(error: BaseException) -> BaseException:
    """Return a LostProcessError for a lost connection that a library met in a transfer of its own; else the error."""
    text = " ".join(str(error).split())
    lost = isinstance(error, RuntimeError) and world_size() > 1 and re.search(CONNECTION_WORDS, text)
    return LostProcessError(_describe_loss(text)) if lost else error


def transfer_seconds() -> float:
    """Return the wall seconds in sums and gathers so far: the transfers, and waiting for the other processes."""
    return _transfer_seconds[0]


def _call(collective, *arguments) -> None:
    start = time.monotonic()
    try:
        collective(*arguments)
        _transfer_seconds[0] += time.monotonic() - start
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # gloo: the connection is closed, or the limit is over
        raise LostProcessError(_describe_loss(" ".join(str(error).split()))) from None


def _send_to_all(parts: list[torch.Tensor], x: torch.Tensor) -> None:
    """Gather like dist.all_gather, of vectors of any lengths; gloo's takes twice as long, for it copies all parts once
    more.
    """
    parts[rank()].copy_(x)
    others = [other for other in range(world_size()) if other != rank()]
    requests = [dist.irecv(parts[other], other) for other in others if len(parts[other])]
    requests += [dist.isend(x, other) for other in others if len(x)]
    for request in requests:
        request.wait()


def _describe_loss(cause: str) -> str:
    """Find out which processes are lost: those that do not answer in the store."""
    resumes = "the same command continues"
    others = [other for other in range(world_size()) if other != rank()]
    try:
        store = _stores[-1]
        store.set(f"answers/{rank()}", "1")
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            failed = [other for other in others if store.check([f"error/{other}"])]
            lost = [other for other in others if other not in failed and not store.check([f"answers/{other}"])]
            if failed or not lost or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if failed:
            return f"the process of rank {failed[0]} failed: {store.get(f'error/{failed[0]}').decode()}"
    except RuntimeError:
        lost = [0]  # it holds the store
    if not lost:
        return f"the processes lost their connection ({cause[:200]}); {resumes}"
    names = " and ".join(map(str, lost))
    return f"the process of rank {names}, one of {world_size()}, has ended or does not answer; {resumes}"
