"""Split the weights of a model's layers over the processes with FSDP2, so that a model may be larger than one card.

Each process stores its share of every layer, and gathers a layer's weights while it computes that layer
(torch.distributed.fsdp.fully_shard; ZeRO stage 3, arXiv 1910.02054). Embeddings, norm after the last layer, heads and
LoRA adapters stay whole in each process.

Gathering is collective: all processes must compute the same layers of the same model at the same time, although each
has rows of its own, and not equally many. Before each forward pass, a process says of which model it is. One that has
no rows left takes part with a pass of one token (`join_other_passes`). Backward passes are balanced by
`units.sum_gradients`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from stages.distributed import group

_backbones: list[nn.Module] = []  # those that are sharded, in the same order in every process
_idle = [False]  # whether the pass at work is one of join_other_passes


def shard(backbone: nn.Module) -> None:
    """Split the weights of the layers of a backbone over the processes; with one process, nothing changes.

    Parameters are replaced: build optimizers afterwards.
    """
    if group.world_size() == 1 or isinstance(backbone, FSDPModule):
        return
    device = next(backbone.parameters()).device.type
    mesh = init_device_mesh(device, (group.world_size(),))
    layers = [layer for layer in backbone.modules() if isinstance(layer, GradientCheckpointingLayer)]
    if not layers:
        raise ValueError(f"sharding: the layers of {type(backbone).__name__} are not known: set it to none")
    for layer in layers:
        adapters = {p for name, p in layer.named_parameters() if ".lora_" in name}
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, ignored_params=adapters)
        layer.set_gradient_divide_factor(1.0)  # gradients are sums over the rows of all processes
        layer.set_force_sum_reduction_for_comms(True)  # gloo has no other
    sharded = {id(p) for layer in layers for p in layer.parameters()}
    others = {p for p in backbone.parameters() if id(p) not in sharded}
    fully_shard(backbone, mesh=mesh, ignored_params=others)  # the root: it orders the transfers of its layers
    _backbones.append(backbone)
    number = len(_backbones)

    def announce_pass(module: nn.Module, arguments: tuple) -> None:
        """Say that a forward pass begins; `join_other_passes` has announced its own."""
        if not _idle[0]:
            _announce(number)

    backbone.register_forward_pre_hook(announce_pass, prepend=True)


def is_active() -> bool:
    """Check whether any model is sharded."""
    return bool(_backbones)


def has_shards(model: nn.Module) -> bool:
    """Check whether `shard` has split layers of a model."""
    return any(isinstance(module, FSDPModule) for module in model.modules())


def join_other_passes() -> None:
    """Take part in the forward passes, without gradients, of the processes that still have rows.

    Call it after each loop over rows that are shared among the processes. Returns when no process has rows left, and at
    once if nothing is sharded.
    """
    if not is_active():
        return
    while number := _announce(0):
        backbone = _backbones[number - 1]
        _idle[0] = True
        try:
            with torch.no_grad():
                backbone(input_ids=torch.zeros(1, 1, dtype=torch.long, device=backbone.device), use_cache=False)
        finally:
            _idle[0] = False


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor that is sharded, and return others unchanged. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor that is sharded, and others unchanged."""
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def split_like(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Split a whole tensor as a parameter of its shape is split; return it unchanged if the parameter is whole."""
    if not isinstance(parameter, DTensor) or isinstance(tensor, DTensor) or tensor.shape != parameter.shape:
        return tensor
    mesh = parameter.device_mesh
    return distribute_tensor(tensor.to(mesh.device_type), mesh, parameter.placements, src_data_rank=None)


def gather_state(model: nn.Module) -> dict[str, torch.Tensor] | None:
    """Gather the state of a model on the CPU of the first process, and nothing in the others; None if it is whole.

    Collective.
    """
    if not has_shards(model):
        return None
    state = {}
    for name, tensor in model.state_dict().items():
        tensor = whole(tensor)
        if group.rank() == 0:
            state[name] = tensor.cpu()
    return state


@contextmanager
def whole_optimizer_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Make the optimizer's state whole for the block, on the CPU, as for a checkpoint. Collective."""
    shards = [(state, key, value) for state in optimizer.state.values() for key, value in state.items()
              if isinstance(value, DTensor)]
    for state, key, value in shards:
        state[key] = whole(value).cpu()
    try:
        yield
    finally:
        for state, key, value in shards:
            state[key] = value


def _announce(number: int) -> int:
    """Say that this process begins a pass of the backbone `number`; 0: none. Return the number of those that do."""
    return int(group.max_tensor(torch.tensor(number)))
