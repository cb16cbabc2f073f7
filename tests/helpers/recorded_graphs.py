"""A stand-in for torch's CUDA graphs on a CPU: a capture records operations without effect, a replay repeats them.

As on a GPU, a replay computes with the tensors of the capture, whatever Python does in between, and writes its results
to the memory of the capture's results. An operation that reads a number on the host is refused.
"""

from contextlib import contextmanager, nullcontext
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stages.generation.cuda_graphs import READING


class RecordedGraph:
    """Stands for torch.cuda.CUDAGraph."""

    def __init__(self):
        self.calls, self.replays = [], 0

    def replay(self):
        self.replays += 1
        for func, args, kwargs, result in self.calls:
            again = func(*args, **kwargs)
            inside = addresses((args, kwargs))
            for old, new in zip(tensors(result), tensors(again), strict=True):
                if address(old) not in inside:  # else it is a view, or was changed in place
                    old.copy_(new)


class _Recording(TorchDispatchMode):
    def __init__(self, calls: list):
        super().__init__()
        self.calls, self.own, self.before = calls, set(), {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if str(func).rsplit(".", 1)[0] in READING:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for x in tensors(args[place] if place < len(args) else kwargs.get(argument.name)):
                    if address(x) not in self.own:
                        self.before.setdefault(address(x), (x.untyped_storage(), x.untyped_storage().clone()))
        result = func(*args, **kwargs)
        self.own |= addresses(result) - addresses((args, kwargs))
        self.calls.append((func, args, kwargs, result))
        return result

    def undo(self):
        for storage, before in self.before.values():
            storage.copy_(before)


def tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def address(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def addresses(tree) -> set[int]:
    return set(map(address, tensors(tree)))


@contextmanager
def pretend_cuda_graphs():
    """Replace what cuda_graphs.StepGraphs calls; yield the list of the graphs that are captured."""
    graphs = []

    @contextmanager
    def capture(graph, pool=None, stream=None):
        recording = _Recording(graph.calls)
        with recording:
            yield
        recording.undo()
        graphs.append(graph)

    with mock.patch.multiple(torch.cuda, Stream=mock.MagicMock, current_stream=mock.MagicMock, CUDAGraph=RecordedGraph,
                             graph_pool_handle=lambda: (0, 1), graph=capture, stream=lambda _: nullcontext()):
        yield graphs
