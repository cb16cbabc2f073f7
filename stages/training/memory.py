"""Memory: what a phase took at most, what a run will need, and what to do when there is not enough.

The device is the GPU where there is one; on a CPU it is the memory of this process, Python and libraries included.
"""

import ctypes
import gc
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import NamedTuple, TypeVar

import torch

from stages.render.units import format_bytes

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
CLEAR_PEAK = "5"  # man 5 proc: resets VmHWM
NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")  # in torch's RuntimeErrors
Result = TypeVar("Result")
_highest = 0


@dataclass
class Cost:
    """Of a phase: wall seconds, and the peak memory of the device while it ran, in bytes."""

    seconds: float = 0.0
    peak_bytes: int = 0


class Row(NamedTuple):
    """One line of a plan."""

    name: str
    bytes: int
    note: str


def peak_bytes() -> int:
    """Peak memory of the device since the process began, whatever was measured in between."""
    return max(_highest, _peak_since_reset())


@contextmanager
def track_peak_memory() -> Iterator[Cost]:
    """A phase's cost, filled in at its end. Phases may follow each other, not lie in each other.

    On a CPU never too low: memory that was freed but kept for the next tensor counts (`dry_run` gives it back first),
    and where the system does not let the peak be reset, an earlier phase's.
    """
    global _highest
    _highest = peak_bytes()
    _reset_peak()
    cost, start = Cost(), monotonic()
    try:
        yield cost
    finally:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        cost.seconds, cost.peak_bytes = monotonic() - start, _peak_since_reset()
        _highest = max(_highest, cost.peak_bytes)


def dry_run(phases: Mapping[str, Callable[[], object]]) -> dict[str, Cost]:
    """Call each phase once, in worst-case shapes, and measure it. What it changes, the caller must undo or not mind."""
    costs = {}
    for name, call in phases.items():
        _free()
        with track_peak_memory() as costs[name]:
            call()
    _free()
    return costs


def find_executable_batch_size(call: Callable[[int], Result], size: int, setting: str = "microbatch_prompts") -> tuple[Result, int]:
    """call(size), with smaller and smaller sizes while memory does not suffice: its result, and the size that fitted.

    Sizes divide the first one. `call` starts afresh each time: it must zero gradients itself. ValueError when even 1 is
    too much; other errors pass through.
    """
    while True:
        try:
            return call(size), size
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
        # Only here: the error held the frames that failed, and they hold tensors.
        _free()
        if size == 1:
            raise ValueError(
                f"out of memory even with {setting} 1: lower max_prompt_tokens or max_response_tokens, turn on "
                f"gradient_checkpointing, or choose a smaller precision or optimizer"
            )
        smaller = next(part for part in range(size // 2, 0, -1) if size % part == 0)
        print(f"{setting} {size} is out of memory: going on with {smaller}", file=sys.stderr, flush=True)
        size = smaller


def tensors_of(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Everything a module keeps in memory: parameters, buffers, and what bitsandbytes keeps beside its weights."""
    for part in module.modules():
        yield from part.buffers(recurse=False)
        for parameter in part.parameters(recurse=False):
            yield parameter
            yield from _scales(part, parameter)


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the tensors, those in the same place (tied weights, a shared base) once."""
    return sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())


def kv_cache_bytes(config, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Keys and values of `rows` texts of `tokens` tokens each, for a model of this configuration."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * rows * tokens * dtype.itemsize


def plan(
    policy: torch.nn.Module,
    others: Mapping[str, torch.nn.Module],
    *,
    optimizer: str,
    optimizer_bytes: int,
    in_backward: bool,
    largest: Mapping[str, int],
    costs: Mapping[str, Cost],
) -> list[Row]:
    """The memory of a run.

    policy: its base and what it trains; others: name to each further model (what it shares with an earlier one costs
    nothing again); largest: name to bytes of each buffer that comes and goes; costs: what `dry_run` gave. No optimiser
    has stepped in a dry run: its state comes on top of those peaks.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    frozen = [t for t in tensors_of(policy) if not t.requires_grad]
    gradients = max((p.nbytes for p in trained), default=0) if in_backward else distinct_bytes(trained)
    rows = [
        Row("frozen base", distinct_bytes(frozen), _dtypes(frozen)),
        Row("trained parameters", distinct_bytes(trained), _dtypes(trained)),
        Row("gradients", gradients, "of the largest parameter: they step in the backward pass" if in_backward else ""),
        Row("optimizer state", optimizer_bytes, optimizer),
    ]
    seen = [*frozen, *trained]
    for name, model in others.items():
        own = list(tensors_of(model))
        rows.append(Row(name, distinct_bytes([*seen, *own]) - distinct_bytes(seen), _dtypes(own)))
        seen += own
    rows += [Row(name, size, "at most") for name, size in largest.items()]
    for name, cost in costs.items():
        note = f"measured, {cost.seconds:.1f} s; without optimizer state"
        rows.append(Row(f"peak of {name}", cost.peak_bytes, note))
    return rows


def table(rows: list[Row]) -> list[str]:
    """A plan as aligned lines of text."""
    width = max(len(row.name) for row in rows)
    return [f"{row.name:<{width}}  {format_bytes(row.bytes):>10}  {row.note}".rstrip() for row in rows]


def _scales(module: torch.nn.Module, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """int8: a scale a row, on the weight and later on the layer; nf4: scales of blocks, themselves quantised or not."""
    kept = [getattr(parameter, "SCB", None), getattr(getattr(module, "state", None), "SCB", None)]
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        kept += [state.absmax, state.code, state.offset]
        state = state.state2
    yield from (tensor for tensor in kept if torch.is_tensor(tensor))


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """The number formats, the one with most bytes first."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = getattr(tensor, "quant_type", str(tensor.dtype).removeprefix("torch."))
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(sorted(sizes, key=sizes.get, reverse=True))


def _is_out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in NO_MEMORY)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        return
    try:
        ctypes.CDLL(None).malloc_trim(0)  # machine.py has the C library keep what is freed
    except (OSError, AttributeError, TypeError):  # another C library
        return


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
