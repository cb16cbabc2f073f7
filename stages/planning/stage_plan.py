"""What the plan of a stage holds, and the memory that its parts add up to."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.planning import shapes
from stages.training.memory_estimate import PlanRow, distinct_bytes, estimate_memory, iter_tensors
from stages.training.optimizers import optimizer_state_bytes

USABLE_SHARE = 0.9  # of a card's memory: the rest is for CUDA's context and the allocator's fragments


class Card(NamedTuple):
    """A card: memory in GiB, 10^12 floating-point operations a second in bf16 without sparsity, GB a second.

    fp32_tflops: of a processor, which is planned with its own rate in fp32; None: that of bf16.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth_gb_s: float
    fp32_tflops: float | None = None


class Hardware(NamedTuple):
    """The cards, and the share of their rates that is reached; None: of a processor, not measured yet."""

    card: Card
    devices: int
    share: float | None

    def compute_seconds(self, flops: float, precision: str | None) -> float:
        """Return the seconds of so many operations, shared among the cards; precision: of the stage, None: fp32."""
        is_fp32 = precision in (None, "fp32")
        tflops = (self.card.fp32_tflops if is_fp32 else None) or self.card.tflops
        return flops / (tflops * 1e12 * self.share * self.devices)

    def own_rows(self, microbatch: int, batch: int) -> int:
        """Return the rows of a forward pass on one card: the cards share a batch."""
        return min(microbatch, -(-batch // self.devices))

    def read_seconds(self, read_bytes: float) -> float:
        """Return the seconds in which one card reads so many bytes of its memory."""
        return read_bytes / (self.card.bandwidth_gb_s * 1e9 * self.share)


class StagePlan(NamedTuple):
    """One stage: parameters, memory of one card by part, and what the whole stage computes and writes.

    trained: parameters that are trained. memory: parts that are there at once. other_times: those of phases that need
    less. assumption: what tokens and seconds rest on. seconds: None if it is not known how much there is to do.
    """

    stage: str
    parameters: int
    trained: int
    memory: list[PlanRow]
    tokens: int
    flops: float
    seconds: float | None
    disk_bytes: int
    assumption: str = ""
    other_times: tuple[tuple[PlanRow, ...], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of one card."""
        return sum(row.bytes for row in self.memory)

    def fits(self, card: Card) -> bool:
        """Check whether the card has that much memory, beside what the allocator and CUDA need."""
        return self.peak_bytes <= USABLE_SHARE * card.memory_gib * (1 << 30)


def stored_memory(
    model: nn.Module, others: Mapping[str, nn.Module], *, precision: str, optimizer: str, sharded_over: int = 1
) -> list[PlanRow]:
    """List what is in memory throughout a training: weights, gradients and optimizer state.

    `model` cannot compute afterwards. sharded_over: processes that share the weights of the layers.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    state_bytes = optimizer_state_bytes(optimizer, trained)
    for part in (model, *others.values()):
        shapes.store_quantised(part, precision)
    rows = estimate_memory(model, others, optimizer=optimizer, optimizer_bytes=state_bytes, largest={}, costs={})
    return rows if sharded_over == 1 else _shard(rows, model, others, sharded_over)


def dequantised_bytes(model: nn.Module, precision: str) -> int:
    """Return the bytes of the largest matrix that is turned into bf16 while it is multiplied; 0 if none is."""
    if precision not in shapes.QUANTISED:
        return 0
    return max(2 * layer.weight.numel() for layer in shapes.quantised_layers(model, precision))


def preset_gradients(model: nn.Module) -> None:
    """Give every trained parameter a gradient, as after a first microbatch."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.empty_like(parameter)


def _shard(rows: list[PlanRow], model: nn.Module, others: Mapping[str, nn.Module], count: int) -> list[PlanRow]:
    """Divide what is in the layers, adapters apart, by the number of processes; add the layers that are gathered."""
    layers = {"": _layer_bytes(model), **{name: _layer_bytes(other) for name, other in others.items()}}
    trained, frozen = _bytes(model, trained=True), _bytes(model, trained=False)
    saved = {name: size * (count - 1) // count for name, size in layers.items()}
    shares = {name: saved[name] for name in others}
    if trained > frozen:  # all weights are trained, and gradients and state are split with them
        state = next(row.bytes for row in rows if row.name == "optimizer state")
        shares |= {"trained parameters": saved[""], "gradients": saved[""],
                   "optimizer state": int(saved[""] * state / max(trained, 1))}
    else:
        shares["frozen base"] = saved[""]
    largest = max(distinct_bytes(iter_tensors(layer)) for layer in _layers(model))
    return [row._replace(bytes=row.bytes - shares.get(row.name, 0)) for row in rows] + [
        PlanRow("gathered layers", 2 * largest, "one at work, one on its way")]


def _layers(model: nn.Module) -> list[nn.Module]:
    return [layer for layer in model.modules() if isinstance(layer, GradientCheckpointingLayer)]


def _layer_bytes(model: nn.Module) -> int:
    adapters = {id(p) for name, p in model.named_parameters() if ".lora_" in name}
    return sum(p.nbytes for layer in _layers(model) for p in layer.parameters() if id(p) not in adapters)


def _bytes(model: nn.Module, trained: bool) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad == trained)
