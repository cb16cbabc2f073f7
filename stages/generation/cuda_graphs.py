"""Capture a decoding step in CUDA graphs, one for each number of rows, and replay them.

A step of a large model launches some thousand kernels, one by one, which takes Python longer than the GPU needs for
their work. A graph launches them at once. It repeats the kernels of its capture with the same addresses: inputs are
copied into tensors that stay where they are, and weights may change in place, but not move. A step that reads a number
on the host, or whose shapes depend on one, cannot be captured; `HostReads` finds that out without a GPU.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.distributed import sharding
from stages.modeling.families import backbone
from stages.runtime.stage_lines import print_line

# Operations that wait for the device, since they return a number to the host or as many elements as a number says.
READING = {"aten._local_scalar_dense", "aten.is_nonzero", "aten.equal", "aten.nonzero", "aten.masked_select",
           "aten._unique2", "aten.unique_dim", "aten.unique_consecutive", "aten.bincount"}
INDEXING = {"aten.index", "aten.index_put", "aten.index_put_", "aten._index_put_impl_"}
COPYING = {"aten._to_copy", "aten.copy_"}


def decode_with_graphs(model: nn.Module, cuda_graphs: bool) -> None:
    """Note on a loaded model whether it decodes by a static cache and CUDA graphs; the recipe's setting cuda_graphs.

    Where graphs cannot be captured, a line says why, and the model decodes as it does without the setting.
    """
    reason = _obstacle(model) if cuda_graphs else None
    if reason:
        _say_once(f"cuda_graphs: decoding without CUDA graphs: {reason}")
    set_static_decoding(model, cuda_graphs and reason is None)


def set_static_decoding(model: nn.Module, static: bool) -> None:
    """Note on the model whether its decoding has a static cache. On a CPU too, where it is only slower."""
    backbone(model).static_decoding = static


def has_static_decoding(model: nn.Module) -> bool:
    """Check what `set_static_decoding` noted; without a note: no."""
    return getattr(backbone(model), "static_decoding", False)


class HostReads(TorchDispatchMode):
    """Note the operations that could not be captured, in `seen`, while they are computed as usual."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = str(func).rsplit(".", 1)[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if (name in READING or (name == "aten.repeat_interleave" and len(args) < 2)
                or (name in INDEXING and any(x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
                                             if isinstance(x, torch.Tensor)))
                or (name in COPYING and any(x.device != result.device for x in tensors))):
            self.seen.add(name)
        return result


class StepGraphs:
    """The captured steps of a decoder, by the number of rows, on one stream and in one pool of memory.

    The first step with a number of rows runs without a graph, so that libraries allocate and choose their kernels
    outside the capture; the second is captured. What a graph computes must be copied to where other graphs do not
    write: they share the pool.
    """

    def __init__(self):
        self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._addresses: list[int] = []
        self._capturable: bool | None = None  # None: not known yet

    def check_weights(self, model: nn.Module) -> None:
        """Forget the graphs if a weight is no longer where it was."""
        addresses = [x.data_ptr() for x in (*model.parameters(), *model.buffers())]
        if addresses != self._addresses:
            self._graphs.clear()
        self._addresses = addresses

    def run(self, rows: int, step: Callable[[], None]) -> None:
        """Compute `step`, which is always the same for the same number of rows."""
        if self._capturable is None:
            with HostReads() as reads:
                self._run_on_stream(step)
            self._capturable = not reads.seen
            self._graphs[rows] = None
            if reads.seen:
                _say_once(f"cuda_graphs: decoding without CUDA graphs: this model reads numbers on the host "
                          f"({', '.join(sorted(reads.seen))})")
        elif not self._capturable:
            step()
        elif rows not in self._graphs:
            self._run_on_stream(step)
            self._graphs[rows] = None
        else:
            if self._graphs[rows] is None:
                self._graphs[rows] = self._capture(step)
            self._graphs[rows].replay()

    def _run_on_stream(self, step: Callable[[], None]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            step()
        torch.cuda.current_stream().wait_stream(self._stream)

    def _capture(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                step()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ValueError(f"a decoding step of this model cannot be captured in a CUDA graph: set cuda_graphs to "
                             f"false ({error})") from error
        return graph


def _obstacle(model: nn.Module) -> str | None:
    """Say why a model's steps cannot be captured; None: nothing known is in the way."""
    if next(model.parameters()).device.type != "cuda":
        return "there is no CUDA device"
    if sharding.has_shards(model):
        return "sharding 'fsdp' gathers the weights of each layer from other processes"
    if getattr(model, "is_loaded_in_8bit", False):
        return "precision int8 looks for outlier columns on the host"
    return None


@cache
def _say_once(text: str) -> None:
    print_line(text)
