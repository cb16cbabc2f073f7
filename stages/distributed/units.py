"""Cut a computation into work units, so that no bit of the result depends on the number of processes.

A unit is a microbatch, or the rows of one forward pass. One process computes it whole, and its rows do not depend on
how many processes there are. What units return is joined in their order: the sum of floating-point numbers depends on
its order, and a backend's all-reduce chooses that by the number of processes.

All functions are collective: every process calls them with the same units.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TypeVar

import torch
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from stages.distributed import group, sharding

Unit = TypeVar("Unit")
# In torch's RuntimeErrors; the last one is of libraries that allocate past torch.
OUT_OF_MEMORY = ("DefaultCPUAllocator", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDA error: out of memory")


def own_units(units: Iterable[Unit]) -> list[Unit]:
    """Return the units of this process; of units that are sorted by size, each process has about as many tokens."""
    return [unit for number, unit in enumerate(units) if _owner(number) == group.rank()]


def share_units(tensors: Sequence[torch.Tensor]) -> None:
    """Overwrite each tensor, a unit, by that of the process that has it in `own_units`. All have one dtype."""
    if group.world_size() == 1 or not tensors:
        return
    owned = [[unit for number, unit in enumerate(tensors) if _owner(number) == rank]
             for rank in range(group.world_size())]
    flat = torch.cat([tensors[0].new_empty(0), *(unit.flatten() for unit in owned[group.rank()])])
    parts = group.gather_vectors(flat, [sum(unit.numel() for unit in units) for units in owned])
    for units, part in zip(owned, parts, strict=True):
        for unit, values in zip(units, part.split([unit.numel() for unit in units]), strict=True):
            unit.copy_(values.view_as(unit))


def sum_in_order(parts: dict[int, torch.Tensor], count: int, width: int) -> torch.Tensor:
    """Sum what `count` units returned, [width] each, from the first unit to the last.

    parts: of this process's units, by number.
    """
    rows = torch.zeros(count, width, dtype=torch.float64)
    for number, part in parts.items():
        rows[number] = part
    total = torch.zeros(width, dtype=torch.float64)
    for row in group.sum_tensor(rows):  # of each row, all processes but one have zeros: the sum is exact
        total += row
    return total


def sum_gradients(
    units: Sequence[Unit], backward: Callable[[Unit, float], torch.Tensor],
    parameters_of: Callable[[Unit], Iterable[Parameter]], width: int
) -> torch.Tensor:
    """Replace the gradients of all units' parameters by their sums; return the sum of what `backward` returns.

    FSDP sums the gradients of sharded parameters (sharding.py), in an order that depends on the number of processes.

    Args:
        units: of one step, in the order in which they are added.
        backward: given a unit and a weight, computes the gradients of the weighted loss and returns [width] numbers.
            The weight is 1. Where layers are sharded, a process that has no unit left takes part with the weight 0.
        parameters_of: given a unit, returns the parameters that it may have gradients for: only these are sent.

    If a process runs out of memory, all raise torch.OutOfMemoryError, or end if layers are sharded.
    """
    trained = [[p for p in parameters_of(unit) if p.requires_grad] for unit in units]
    for parameter in chain.from_iterable(trained):
        parameter.grad = None
    total, parts = OrderedGradients(), {}
    for first in range(0, len(units), group.world_size()):
        numbers = range(first, min(first + group.world_size(), len(units)))
        number_of = {_owner(number): number for number in numbers}
        if (number := number_of.get(group.rank())) is not None:
            parts[number] = _agree_on_memory(lambda unit=units[number]: backward(unit, 1.0))
        else:
            _agree_on_memory(lambda unit=units[first]: backward(unit, 0.0) if sharding.is_active() else None)
        if group.world_size() > 1:
            total.add({rank: trained[number] for rank, number in number_of.items()})
    total.finish()
    return sum_in_order(parts, len(units), width)


class OrderedGradients:
    """Sums of the gradients of units, added in their order. One process adds in `.grad` itself, as autograd does."""

    def __init__(self):
        self.sums: dict[Parameter, torch.Tensor] = {}

    def add(self, parameters: dict[int, list[Parameter]]) -> None:
        """Add the gradients of each process's unit, in the order of the units, and clear this process's.

        parameters: of the unit of each process, by rank; a rank without a unit is absent.
        """
        plain = {rank: [p for p in unit if not isinstance(p, DTensor)] for rank, unit in parameters.items()}
        for dtype in dict.fromkeys(p.dtype for unit in plain.values() for p in unit):
            self._add_dtype({rank: [p for p in unit if p.dtype == dtype] for rank, unit in plain.items()})
        for parameter in plain.get(group.rank(), ()):
            parameter.grad = None

    def finish(self) -> None:
        """Write the sums to `.grad`; one that no unit has stays None."""
        for parameter, total in self.sums.items():
            parameter.grad = total

    def _add_dtype(self, parameters: dict[int, list[Parameter]]) -> None:
        """Do `add` for parameters of one dtype: send which have gradients, and these."""
        sizes = {rank: [len(unit), *(p.numel() for p in unit)] for rank, unit in parameters.items()}
        like = next(unit[0] for unit in parameters.values() if unit)
        own = parameters.get(group.rank(), [])
        parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own]
        flat = torch.cat([like.new_tensor([p.grad is not None for p in own]), *parts])
        flats = group.gather_vectors(flat, [sum(sizes.get(rank, [])) for rank in range(group.world_size())])
        for rank, unit in parameters.items():
            given, *gradients = flats[rank].split(sizes[rank])
            for parameter, has_gradient, gradient in zip(unit, given.tolist(), gradients, strict=True):
                if has_gradient and parameter in self.sums:
                    self.sums[parameter].add_(gradient.view_as(parameter))
                elif has_gradient:
                    self.sums[parameter] = gradient.view_as(parameter)


def is_out_of_memory(error: RuntimeError) -> bool:
    """Check whether torch, or a library below it, had no memory left."""
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)


def _agree_on_memory(call: Callable[[], torch.Tensor | None]) -> torch.Tensor | None:
    """Return call(); if memory runs out in one process, raise torch.OutOfMemoryError in all."""
    failure = result = None
    try:
        result = call()
    except RuntimeError as error:
        if sharding.is_active() or not is_out_of_memory(error):
            raise
        failure = str(error)
    if not sharding.is_active() and group.any_process(failure is not None):
        raise torch.OutOfMemoryError(failure or "another process is out of memory")
    return result


def _owner(number: int) -> int:
    """Return the process that a unit goes to: 0 1 2 2 1 0 0 1 2 ..."""
    turn, index = divmod(number, group.world_size())
    return group.world_size() - 1 - index if turn % 2 else index
