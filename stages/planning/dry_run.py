"""Run a training step on the meta device: its tensors have shapes and no values, and take no memory.

The step is the stage's own code, so the peak is that of the tensors it allocates, whatever the model family. Indices
(token ids, positions, lengths) stay on the CPU with their values, because the code reads them. Attention is the fused
kernel's, as on a GPU.
"""

import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.autograd.graph import _engine_run_backward
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from torch.utils.weak import WeakIdKeyDictionary

from stages.planning.shapes import META

# Floating-point operations of matrix products and attention, by operator; on the meta device attention is the CPU's.
FLOPS = flop_registry | {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:
        lambda query, key, value, *rest, **more: sdpa_flop_count(query.shape, key.shape, value.shape),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, query, key, value, *rest, **more: sdpa_backward_flop_count(
            grad.shape, query.shape, key.shape, value.shape),
}


class StepCost(NamedTuple):
    """What a step costs: peak bytes of the tensors that it allocates, and floating-point operations."""

    peak_bytes: int
    flops: int


def dry_run(step: Callable[[], object]) -> StepCost:
    """Run `step`, which computes with models on the meta device; its models' weights are not part of the peak."""
    costs = _Costs()
    with costs, _ValuesOfIndices():
        result = step()
    del result
    return StepCost(costs.peak, costs.flops)


class _Costs(TorchDispatchMode):
    """Count the bytes of the meta tensors that are alive, by storage, their peak, and operations.

    torch's FlopCounterMode is not used: its hooks on modules and on the graph keep recomputed tensors alive.
    """

    def __init__(self):
        super().__init__()
        self.current, self.peak, self.flops = 0, 0, 0
        self._sizes = WeakIdKeyDictionary()  # storage -> bytes, so that views count once

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if _is_meta(leaf)}
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if _is_meta(leaf) and leaf.untyped_storage()._cdata not in inputs:
                self._add(leaf.untyped_storage())
        if (count := FLOPS.get(func.overloadpacket)) is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        if storage not in self._sizes:
            size = storage.nbytes()
            self._sizes[storage] = size
            self.current += size
            self.peak = max(self.peak, self.current)
            weakref.finalize(storage, self._remove, size)

    def _remove(self, size: int) -> None:
        self.current -= size


class _ValuesOfIndices(TorchFunctionMode):
    """Leave data on the CPU that is to be moved to the meta device, and create indices there.

    A tensor with values gives them up once it meets a tensor without: what is computed from both has none.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.backward:  # with this mode on, for layers that are computed again
            with self:  # torch.autograd.backward would come here, too
                return _engine_run_backward(
                    (args[0],), (torch.ones_like(args[0]),), False, False, (), allow_unreachable=True,
                    accumulate_grad=True)
        if func is torch.Tensor.to and args[0].device.type == "cpu" and _names_meta(args[1:], kwargs):
            return args[0]
        if func in (torch.tensor, torch.arange) and kwargs.get("device") == META:
            kwargs["device"] = "cpu"
        if func is functional.scaled_dot_product_attention:
            return _fused_attention(*args, **kwargs)
        if any(map(_is_meta, tree_leaves((args, kwargs)))):
            args, kwargs = tree_map_only(torch.Tensor, _without_values, (args, kwargs))
        return func(*args, **kwargs)


def _fused_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None):
    """Attend as the fused kernel does: it stores its inputs, its output and one number a row, and no weights."""
    if query.dim() == 3:  # [B, T, W]: of one head
        query, key, value = query[None], key[None], value[None]
        return _fused_attention(query, key, value, None, dropout_p, is_causal, scale)[0]
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, is_causal, scale=scale)[0]


def _is_meta(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "meta"


def _names_meta(args: tuple, kwargs: dict) -> bool:
    return any(value in (META, "meta") for value in (*args, *kwargs.values()) if isinstance(value, str | torch.device))


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta") if tensor.device.type == "cpu" and tensor.dim() else tensor
