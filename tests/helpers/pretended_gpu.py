"""Pretend that a process has a GPU: tensors on it compute on the CPU, and mixing them with others raises as on CUDA.

What a GPU run would stop at is found without one: a tensor made on the wrong device, an operation between devices.
`pretend` changes torch for the whole process: call it in one of its own (tests/cuda/placement_worker.py).
"""

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "pretended"
# Operations that torch allows between devices: copies, reading a number, and indexing by an index on the CPU.
CROSSING = {"aten._to_copy", "aten.copy_", "aten._local_scalar_dense", "aten.index", "aten.index_put",
            "aten.index_put_", "aten._index_put_impl_"}
FACTORIES = (torch.tensor, torch.as_tensor)


class GpuTensor(torch.Tensor):
    """A tensor on the pretended device; `raw` holds its numbers."""

    @staticmethod
    def __new__(cls, raw):
        return torch.Tensor._make_wrapper_subclass(
            cls, raw.size(), strides=raw.stride(), storage_offset=raw.storage_offset(), dtype=raw.dtype,
            device=torch.device(NAME, 0))

    def __init__(self, raw):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16]


class _Dispatch(TorchDispatchMode):
    """Make tensors on the device also where no argument is on it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _dispatch(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    """Replace what torch does in C++ past every dispatcher."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func == torch.Tensor.data.__set__ and isinstance(args[0], GpuTensor):
            args[0].raw = args[1].raw
            return None
        if func is torch.Tensor.tolist:
            return func(args[0].cpu())
        if func in FACTORIES and _is_gpu(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__):
            key = args[1] if isinstance(args[1], tuple) else (args[1],)
            args = (args[0], tuple(torch.tensor(k) if isinstance(k, list) else k for k in key), *args[2:])
        return func(*args, **kwargs)


def pretend() -> torch.device:
    """Register the device with torch; it is used inside `with modes()`."""
    backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=_Module())
    torch.__future__.set_swap_module_params_on_conversion(True)  # module.to(device) keeps the class of its tensors
    return torch.device(NAME, 0)


def modes() -> tuple:
    return _Dispatch(), _Functions()


def _is_gpu(device) -> bool:
    return device is not None and torch.device(device).type == NAME


def _dispatch(func, args, kwargs):
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    own = [x for x in tensors if isinstance(x, GpuTensor)]
    name = str(func).rsplit(".", 1)[0]
    if own and name not in CROSSING and any(x.dim() for x in tensors if not isinstance(x, GpuTensor)):
        raise RuntimeError(f"{func}: tensors on the CPU and on the GPU")
    on_gpu = bool(own) if kwargs.get("device") is None else _is_gpu(kwargs["device"])
    if name == "aten.copy_":
        on_gpu = isinstance(args[0], GpuTensor)
    if _is_gpu(kwargs.get("device")):
        kwargs = kwargs | {"device": torch.device("cpu")}
    wrappers = {id(x.raw): x for x in own}

    def wrap(x):
        if not isinstance(x, torch.Tensor) or isinstance(x, GpuTensor):
            return x
        return wrappers.get(id(x)) if id(x) in wrappers else GpuTensor(x) if on_gpu else x

    return tree_map(wrap, func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs)))


def _unwrap(x):
    return x.raw if isinstance(x, GpuTensor) else x
