"""Estimate the memory of a run from its models, optimizer and buffers, and format it as a table."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch

from stages.distributed.sharding import local
from stages.render.units import format_bytes
from stages.training.memory import PhaseCost


class PlanRow(NamedTuple):
    """One line of the memory plan."""

    name: str
    bytes: int
    note: str


def estimate_memory(
    policy: torch.nn.Module, others: Mapping[str, torch.nn.Module], *, optimizer: str, optimizer_bytes: int,
    largest: Mapping[str, int], costs: Mapping[str, PhaseCost],
) -> list[PlanRow]:
    """List the memory of a run, in bytes.

    Args:
        policy: the trained model and its frozen base.
        others: further models by name; tensors shared with an earlier model count once.
        largest: peak bytes of temporary buffers by name.
        costs: what `measure_phases` measured; no optimizer steps in it, so its state comes on top of those peaks.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    frozen = [t for t in iter_tensors(policy) if not t.requires_grad]
    rows = [
        PlanRow("frozen base", distinct_bytes(frozen), _dtypes(frozen)),
        PlanRow("trained parameters", distinct_bytes(trained), _dtypes(trained)),
        PlanRow("gradients", distinct_bytes(trained), ""),
        PlanRow("optimizer state", optimizer_bytes, optimizer),
    ]
    counted = [*frozen, *trained]
    for name, model in others.items():
        tensors = list(iter_tensors(model))
        rows.append(PlanRow(name, distinct_bytes([*counted, *tensors]) - distinct_bytes(counted), _dtypes(tensors)))
        counted += tensors
    rows += [PlanRow(name, size, "at most") for name, size in largest.items()]
    for name, cost in costs.items():
        note = f"measured, {cost.seconds:.1f} s; without optimizer state"
        rows.append(PlanRow(f"peak of {name}", cost.peak_bytes, note))
    return rows


def format_plan(rows: list[PlanRow]) -> list[str]:
    """Format a memory plan as aligned lines."""
    width = max(len(row.name) for row in rows)
    return [f"{row.name:<{width}}  {format_bytes(row.bytes):>10}  {row.note}".rstrip() for row in rows]


def iter_tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor that a module stores: parameters, buffers, and bitsandbytes' quantisation state."""
    for part in module.modules():
        yield from part.buffers(recurse=False)
        for parameter in part.parameters(recurse=False):
            yield parameter
            yield from _quantisation_tensors(part, parameter)


def distinct_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bytes of the tensors in this process; those at one address (tied weights, a shared base) count once."""
    parts = [local(tensor) for tensor in tensors]
    return sum({(t.data_ptr() or id(t), t.nbytes): t.nbytes for t in parts}.values())  # on meta, all are at address 0


def kv_cache_bytes(config, rows: int, tokens: int, dtype: torch.dtype) -> int:
    """Compute the bytes of the keys and values of `rows` sequences of `tokens` tokens."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * width * rows * tokens * dtype.itemsize


def _quantisation_tensors(module: torch.nn.Module, parameter: torch.nn.Parameter) -> Iterator[torch.Tensor]:
    """int8: a scale per row, on the weight and later on the layer. nf4: scales per block, quantised or not."""
    tensors = [getattr(parameter, "SCB", None), getattr(getattr(module, "state", None), "SCB", None)]
    state = getattr(parameter, "quant_state", None)
    while state is not None:
        tensors += [state.absmax, state.code, state.offset]
        state = state.state2
    yield from (tensor for tensor in tensors if torch.is_tensor(tensor))


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    """Name the number formats, the one with most bytes first."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        name = getattr(tensor, "quant_type", str(tensor.dtype).removeprefix("torch."))
        sizes[name] = sizes.get(name, 0) + tensor.nbytes
    return ", ".join(sorted(sizes, key=sizes.get, reverse=True))
