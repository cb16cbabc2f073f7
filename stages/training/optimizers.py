"""Build the optimizers that a recipe can name, clip gradients, and predict the size of the optimizer state.

adam: weight decay is added to the gradient (arXiv 1412.6980). adamw: it is taken from the weights (arXiv 1711.05101).
adamw_8bit: AdamW with 8-bit moments in blocks of 256 (arXiv 2110.02861; tensors under 4096 elements keep 32 bits).
paged_adamw_8bit: the same, with moments paged out to the host when the GPU is full (arXiv 2305.14314). adafactor:
factored second moments (arXiv 1804.04235) at a constant learning rate, not scaled by the weights. muon: see
`MuonWithAdamW`.
"""

import math
from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.overrides import TorchFunctionMode
from transformers.optimization import Adafactor

from stages.distributed import sharding
from stages.distributed.units import own_units, share_units
from stages.runtime.environment import has_bf16_products

BLOCK_ELEMENTS = 256  # elements that share a scale in bitsandbytes' 8-bit state
ONE_THREAD_ELEMENTS = 1 << 14  # from 1 << 15 on, torch divides a sum among its threads
MIN_8BIT_ELEMENTS = 4096  # bitsandbytes keeps the state of smaller tensors in 32 bits


def build_optimizer(
    name: str, parameters: Iterable, *, learning_rate: float, epsilon: float, weight_decay: float
) -> torch.optim.Optimizer:
    """Build the optimizer called `name` for parameters, or for groups of them with settings of their own.

    epsilon: of Adam's denominator (Adafactor has its own, 1e-30).
    """
    parameters = list(parameters)
    shared = {"lr": learning_rate, "weight_decay": weight_decay}
    if name == "adafactor":
        return Adafactor(parameters, **shared, scale_parameter=False, relative_step=False)
    if name in ("adam", "adamw"):
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return kind(parameters, **shared, eps=epsilon, fused=True)  # one kernel: a quarter of the default's time
    if name not in ("adamw_8bit", "paged_adamw_8bit"):
        raise ValueError(f"there is no optimizer {name!r}")
    from bitsandbytes import optim  # slow to import, and most runs do without

    paged = name == "paged_adamw_8bit"
    if paged and not _all_on_gpu(parameters):
        # bitsandbytes would only warn, and run unpaged.
        raise ValueError("optimizer paged_adamw_8bit needs a CUDA GPU to page from: use adamw_8bit here")
    return (optim.PagedAdamW8bit if paged else optim.AdamW8bit)(parameters, **shared, eps=epsilon)


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for the weight matrices of the layers, AdamW for embeddings, score head and vectors (Jordan et al. 2024).

    Muon's update is the momentum made orthogonal by Newton-Schulz iterations. It is scaled to the root mean square of
    AdamW's (Liu et al. 2025, arXiv 2502.16982), so that both take the same learning rate.
    """

    def __init__(self, model: torch.nn.Module, *, learning_rate: float, weight_decay: float):
        matrices, others = split_matrices(model)
        shared = {"lr": learning_rate, "weight_decay": weight_decay}
        self.muon = torch.optim.Muon(matrices, **shared, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(others, **shared)
        super().__init__([*self.muon.param_groups, *self.adamw.param_groups], {})
        self._share_state()

    def step(self, closure=None):
        """Step both optimizers."""
        loss = closure() if closure else None
        with nullcontext() if has_bf16_products() else _StayInFp32():
            self._step_muon()
        self.adamw.step()
        return loss

    @torch.no_grad()
    def _step_muon(self) -> None:
        """Step Muon; the matrices are work units, and each process makes the momentum of its own ones orthogonal."""
        if sharding.is_active():  # torch computes on the shards
            self.muon.step()
            return
        settings, = self.muon.param_groups
        matrices = [p for p in settings["params"] if p.grad is not None]
        own = set(own_units(matrices))
        gradients = {p: p.grad for p in matrices if p not in own}
        for p in gradients:
            p.grad = None  # torch leaves out what has none
        self.muon.step()
        for p, gradient in gradients.items():
            p.grad, state = gradient, self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(gradient)
            state["momentum_buffer"].lerp_(gradient, 1 - settings["momentum"])  # as torch's, whole in each checkpoint
        share_units(matrices)

    def load_state_dict(self, state_dict: dict) -> None:
        """Load a state that `state_dict` returned."""
        super().load_state_dict(state_dict)
        self._share_state()

    def _share_state(self) -> None:
        """Let both optimizers use this one's groups and state: a scheduler or a checkpoint knows only this one."""
        count = len(self.muon.param_groups)
        self.muon.param_groups, self.adamw.param_groups = self.param_groups[:count], self.param_groups[count:]
        self.muon.state = self.adamw.state = self.state


class _StayInFp32(TorchFunctionMode):
    """Let Muon's Newton-Schulz iterations, which torch computes in bf16, stay in fp32: bf16 is emulated here."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.bfloat16:
            return args[0].clone()
        return function(*args, **(kwargs or {}))


def split_matrices(model: torch.nn.Module) -> tuple[list[torch.nn.Parameter], list[torch.nn.Parameter]]:
    """Split the trained parameters into weight matrices of layers, and embeddings, output layers and vectors."""
    vocabulary = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    matrices, others = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_matrix = (parameter.ndim == 2 and min(parameter.shape) > 1 and id(parameter) not in vocabulary
                         and "lm_head" not in name)
            (matrices if is_matrix else others).append(parameter)
    return matrices, others


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to that which it was built with, times the factor of a schedule."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor


def clip_gradient_norm(optimizer: torch.optim.Optimizer, limit: float | None) -> float:
    """Scale the gradients of each parameter group down to the 2-norm `limit` (None: leave them).

    Returns the norm of all gradients before. A separate critic is a group of its own: its error, large at first, must
    not shrink the policy's step.
    """
    return math.hypot(*(clip_gradients(group["params"], limit) for group in optimizer.param_groups))


def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float | None) -> float:
    """Scale gradients, of which some may be sharded, down to the 2-norm `limit` (None: leave them); return the norm."""
    parameters = [p for p in parameters if p.grad is not None]
    if not parameters:
        return 0.0
    kinds = [[p for p in parameters if isinstance(p.grad, DTensor) == sharded] for sharded in (False, True)]
    norms = [sharding.whole(get_total_norm(_split_gradients(kind))) for kind in kinds if kind]
    norm = norms[0] if len(norms) == 1 else get_total_norm(norms)
    if limit is not None:
        for kind in filter(None, kinds):
            clip_grads_with_norm_(kind, limit, norm)
    return float(norm)


def _split_gradients(parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Split gradients into pieces that torch sums in one thread: its threads each sum a part, in another order.

    Sharded ones stay whole.
    """
    if isinstance(parameters[0].grad, DTensor):
        return [p.grad for p in parameters]
    return [piece for p in parameters for piece in p.grad.flatten().split(ONE_THREAD_ELEMENTS)]


def optimizer_state_bytes(name: str, parameters: Iterable[torch.nn.Parameter]) -> int:
    """Predict the bytes of the optimizer's state after its first step, without a few bytes of counters."""
    return sum(_parameter_state_bytes(name, parameter) for parameter in parameters)


def _all_on_gpu(parameters: list) -> bool:
    return all(p.device.type == "cuda" for p in _flatten(parameters))


def _flatten(parameters: list) -> list[torch.nn.Parameter]:
    """List the parameters of groups."""
    return [p for entry in parameters for p in (entry["params"] if isinstance(entry, dict) else [entry])]


def _parameter_state_bytes(name: str, parameter: torch.nn.Parameter) -> int:
    count, shape = parameter.numel(), parameter.shape
    if name == "adafactor":
        return 4 * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)
    if name in ("adamw_8bit", "paged_adamw_8bit"):
        return 2 * count + 2 * 4 * math.ceil(count / BLOCK_ELEMENTS) if count >= MIN_8BIT_ELEMENTS else 2 * 4 * count
    return 2 * parameter.nbytes
