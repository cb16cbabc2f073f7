"""Measure the peak memory of a phase, and retry with smaller batches when memory runs out.

The device is the GPU if there is one. On a CPU it is the memory of this process, Python and libraries included.
"""

import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import TypeVar

import torch

from stages.distributed import group, sharding
from stages.distributed.units import is_out_of_memory
from stages.runtime.environment import return_freed_memory
from stages.runtime.stage_lines import print_line

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # man 5 proc: resets VmHWM
Result = TypeVar("Result")
_highest = 0


@dataclass
class PhaseCost:
    """Wall time of a phase in seconds, and the device's peak memory meanwhile in bytes."""

    seconds: float = 0.0
    peak_bytes: int = 0


def peak_bytes() -> int:
    """Return the device's peak memory since the process started, across all resets."""
    return max(_highest, _peak_since_reset())


@contextmanager
def track_peak_memory() -> Iterator[PhaseCost]:
    """Measure a phase; the yielded cost is filled in when it ends. Phases must not be nested.

    On a CPU the peak is an upper bound: it includes freed memory that the allocator keeps (`measure_phases` releases it
    first) and, where the system does not permit a reset, the peaks of earlier phases.
    """
    global _highest
    _highest = peak_bytes()
    _reset_peak()
    cost, start = PhaseCost(), monotonic()
    try:
        yield cost
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cost.seconds, cost.peak_bytes = monotonic() - start, _peak_since_reset()
        _highest = max(_highest, cost.peak_bytes)


def measure_phases(phases: Mapping[str, Callable[[], object]]) -> dict[str, PhaseCost]:
    """Call and measure each phase once; the caller undoes what they change."""
    costs = {}
    for name, call in phases.items():
        _release_memory()
        with track_peak_memory() as costs[name]:
            call()
    _release_memory()
    return costs


def retry_with_smaller_batches(
    call: Callable[[int], Result], size: int, setting: str = "microbatch_prompts"
) -> tuple[Result, int]:
    """Return call(size) and `size`, made smaller until memory suffices; each size divides the one before.

    Where it does not suffice in one process, all go on with less. `call` must zero its gradients itself. Raises
    ValueError if even size 1 does not fit; other errors pass through.
    accelerate's find_executable_batch_size collects garbage before every call, which would slow down each minibatch,
    and its sizes need not divide the minibatch.
    """
    while True:
        failed = False
        try:
            result = call(size)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            if sharding.is_active():  # the others wait in the middle of a pass
                raise ValueError(f"out of memory with {setting} {size} and sharded weights: lower it") from None
            failed = True
        if not group.any_process(failed):
            return result, size
        # Outside of the except clause: the error holds the failed frames, and they hold tensors.
        _release_memory()
        if size == 1:
            raise ValueError(
                f"out of memory even with {setting} 1: lower max_prompt_tokens or max_response_tokens, turn on "
                f"gradient_checkpointing, or choose a smaller precision or optimizer"
            )
        smaller = next(divisor for divisor in range(size // 2, 0, -1) if size % divisor == 0)
        print_line(f"{setting} {size} is out of memory: going on with {smaller}")
        size = smaller


def _release_memory() -> None:
    return_freed_memory()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _peak_since_reset() -> int:
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    try:
        lines = STATUS.read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    except (OSError, StopIteration):  # not Linux
        unit = 1 if sys.platform == "darwin" else 1024
        return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    try:
        CLEAR.write_text(CLEAR_PEAK)
    except OSError:  # not Linux, or not permitted
        return


class PhaseTimer:
    """Seconds, tokens per second and peak memory of the phases of one iteration."""

    def __init__(self):
        self.costs: dict[str, PhaseCost] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the phase `name`. Phases cannot be nested."""
        with track_peak_memory() as self.costs[name]:
            yield

    def metrics(self, tokens: dict[str, int]) -> dict[str, float]:
        """Return NAME_seconds and NAME_tokens_per_second of each phase, and peak_memory_mib; tokens: by phase."""
        metrics: dict[str, float] = {"peak_memory_mib": round(max(c.peak_bytes for c in self.costs.values()) / 2**20)}
        for name, cost in self.costs.items():
            metrics[f"{name}_seconds"] = round(cost.seconds, 3)
            metrics[f"{name}_tokens_per_second"] = round(tokens[name] / max(cost.seconds, 1e-9))
        return metrics
