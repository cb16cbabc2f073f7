"""Cut a computation into work units, so that no bit of the result depends on the number of processes.

A unit is a microbatch, or the rows of one forward pass. One process computes it whole, and its rows do not depend on
how many processes there are. What units return is joined in their order: the sum of floating-point numbers depends on
its order, and a backend's all-reduce chooses that by the number of processes.

All functions are collective: every process calls them with the same units.
"""

from collections.abc import Callable, Iterable, Sequence
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
    units: Sequence[Unit], backward: Callable[[Unit, float], torch.Tensor], parameters: Iterable[Parameter], width: int
) -> torch.Tensor:
    """Replace the gradients of `parameters` by their sums over all units; return the sum of what `backward` returns.

    FSDP sums the gradients of sharded parameters (sharding.py), in an order that depends on the number of processes.

    Args:
        units: of one step, in the order in which they are added.
        backward: given a unit and a weight, computes the gradients of the weighted loss and returns [width] numbers.
            The weight is 1. Where layers are sharded, a process that has no unit left takes part with the weight 0.

    If a process runs out of memory, all raise torch.OutOfMemoryError, or end if layers are sharded.
    """
    trained = [p for p in parameters if p.requires_grad]
    for parameter in trained:
        parameter.grad = None
    total, parts = OrderedGradients(trained), {}
    for first in range(0, len(units), group.world_size()):
        owners = [_owner(number) for number in range(first, min(first + group.world_size(), len(units)))]
        if group.rank() in owners:
            number = first + owners.index(group.rank())
            parts[number] = _agree_on_memory(lambda unit=units[number]: backward(unit, 1.0))
        else:
            _agree_on_memory(lambda unit=units[first]: backward(unit, 0.0) if sharding.is_active() else None)
        total.add(owners)
    total.finish()
    return sum_in_order(parts, len(units), width)


class OrderedGradients:
    """Sums of the gradients of units, added in their order. One process adds in `.grad` itself, as autograd does."""

    def __init__(self, parameters: list[Parameter]):
        self.kinds: dict[tuple, list[Parameter]] = {}
        if group.world_size() > 1:
            for parameter in parameters:
                if not isinstance(parameter, DTensor):
                    self.kinds.setdefault((parameter.dtype, parameter.device), []).append(parameter)
        self.sums: dict[tuple, torch.Tensor] = {}

    def add(self, owners: list[int]) -> None:
        """Add the gradients of the processes `owners`, in this order, and clear this process's."""
        for kind, parameters in self.kinds.items():
            given = torch.tensor([p.grad is not None for p in parameters], dtype=kind[0], device=kind[1])
            parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in parameters]
            flats = group.gather_tensors(torch.cat([given, *parts]))
            for owner in owners:
                self.sums[kind] = self.sums[kind].add_(flats[owner]) if kind in self.sums else flats[owner]
            for parameter in parameters:
                parameter.grad = None

    def finish(self) -> None:
        """Write the sums to `.grad`; one that no unit has stays None."""
        for kind, parameters in self.kinds.items():
            given, flat = self.sums[kind].split([len(parameters), len(self.sums[kind]) - len(parameters)])
            sums = flat.split([parameter.numel() for parameter in parameters])
            for parameter, has_gradient, total in zip(parameters, given.tolist(), sums, strict=True):
                parameter.grad = total.view_as(parameter).clone() if has_gradient else None


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
