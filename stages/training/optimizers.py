"""The optimisers a recipe can name, each behind the interface of torch.optim.Optimizer.

adam: weight decay is added to the gradient (arXiv 1412.6980). adamw: it is taken from the weights (arXiv 1711.05101).
adamw_8bit: AdamW, its moments in 8 bits by blocks of 256 (arXiv 2110.02861; tensors under 4096 elements keep 32 bits).
paged_adamw_8bit: the same, moments paged out to the host when the GPU is full (arXiv 2305.14314). adafactor: second
moments by rows and columns (arXiv 1804.04235), at the step size given: neither relative nor scaled by the weights.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.utils import clip_grad_norm_, get_total_norm
from transformers.optimization import Adafactor

BLOCK = 256  # elements that share a scale in bitsandbytes' 8-bit state
SMALL = 4096  # elements: bitsandbytes keeps the state of smaller tensors in 32 bits


def build(
    name: str,
    parameters: Iterable[torch.nn.Parameter],
    *,
    learning_rate: float,
    epsilon: float,
    weight_decay: float,
    in_backward: bool = False,
) -> "torch.optim.Optimizer | InBackward":
    """The optimiser called `name`; epsilon: of Adam's denominator (Adafactor has its own, 1e-30).

    in_backward: each parameter steps as soon as its gradient is there, see InBackward. ValueError: no GPU to page from.
    """
    parameters = list(parameters)
    shared = {"lr": learning_rate, "weight_decay": weight_decay}
    if name == "adafactor":
        optimizer = Adafactor(parameters, **shared, scale_parameter=False, relative_step=False)
    elif name in ("adam", "adamw"):
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        optimizer = kind(parameters, **shared, eps=epsilon)
    elif name in ("adamw_8bit", "paged_adamw_8bit"):
        from bitsandbytes import optim  # slow to import, and most runs do without

        paged = name == "paged_adamw_8bit"
        if paged and any(p.device.type != "cuda" for p in parameters):
            # bitsandbytes would go on, unpaged, with a warning.
            raise ValueError("optimizer paged_adamw_8bit needs a CUDA GPU to page from: use adamw_8bit here")
        optimizer = (optim.PagedAdamW8bit if paged else optim.AdamW8bit)(parameters, **shared, eps=epsilon)
    else:
        raise ValueError(f"there is no optimizer {name!r}")
    return InBackward(optimizer) if in_backward else optimizer


class InBackward:
    """Steps within the backward pass: no more than one accumulated gradient is alive (LOMO, arXiv 2306.09782).

    One backward pass is one step, so gradients can be neither accumulated nor clipped by their global norm, and a
    minibatch can only be skipped before its backward pass. A parameter whose gradient is not finite does not move.
    """

    def __init__(self, inner: torch.optim.Optimizer):
        self.inner, self.paused = inner, False
        self._norms: list[float] = []
        for parameter in _parameters(inner):
            parameter.register_post_accumulate_grad_hook(self._step_one)

    @property
    def param_groups(self) -> list[dict]:
        return self.inner.param_groups

    @property
    def state(self) -> dict:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begin a step: forget the norm of the last one. There are no gradients to zero."""
        self._norms = []

    def step(self) -> None:
        """Nothing: by now every parameter has stepped."""

    def gradient_norm(self) -> float:
        """Global 2-norm of the gradients since zero_grad."""
        return math.hypot(*self._norms)

    def _step_one(self, parameter: torch.nn.Parameter) -> None:
        self._norms.append(float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float32)))
        if math.isfinite(self._norms[-1]) and not self.paused:
            self.inner.step()  # the others have no gradient, and an optimiser passes over those
        parameter.grad = None


def gradient_norm(optimizer: "torch.optim.Optimizer | InBackward", limit: float | None) -> float:
    """Global 2-norm of the gradients, after which they are scaled down to `limit`; None: they are left as they are."""
    if isinstance(optimizer, InBackward):
        return optimizer.gradient_norm()
    if limit is None:
        return float(get_total_norm([p.grad for p in _parameters(optimizer) if p.grad is not None]))
    return float(clip_grad_norm_(_parameters(optimizer), limit))


@contextmanager
def without_steps(optimizer: "torch.optim.Optimizer | InBackward") -> Iterator[None]:
    """Backward passes that leave the parameters alone, for a dry run."""
    steps_in_backward = isinstance(optimizer, InBackward)
    if steps_in_backward:
        optimizer.paused = True
    try:
        yield
    finally:
        if steps_in_backward:
            optimizer.paused = False


def state_bytes(name: str, parameters: Iterable[torch.nn.Parameter]) -> int:
    """What the state of that optimiser will take once it has stepped (a few bytes of counters left out)."""
    return sum(_state_bytes_of_one(name, parameter) for parameter in parameters)


def _state_bytes_of_one(name: str, parameter: torch.nn.Parameter) -> int:
    count, shape = parameter.numel(), parameter.shape
    if name == "adafactor":
        return 4 * (count // shape[-1] + count // shape[-2] if len(shape) > 1 else count)
    if name in ("adamw_8bit", "paged_adamw_8bit"):
        return 2 * count + 2 * 4 * math.ceil(count / BLOCK) if count >= SMALL else 2 * 4 * count
    return 2 * parameter.nbytes


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
