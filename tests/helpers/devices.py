"""Run a test on the CPU and, where there is one, on a GPU. `pytest -m cuda` runs those on the GPU alone."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

GPU = pytest.param("cuda", marks=[
    pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])
every_device = pytest.mark.parametrize("device", ["cpu", GPU])  # on the CPU the test's body runs, at least
on_gpu = pytest.mark.parametrize("device", [GPU])


@contextmanager
def computing_on(device: str) -> Iterator[torch.device]:
    """Let stages compute on this device; on the CPU although there may be a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            patch.setattr(torch.cuda, "is_available", lambda: False)
        yield torch.device(device)


def move_adapter(policy) -> None:
    """Change the trained parameters as learning does, on every device alike: B is no longer 0."""
    with torch.no_grad():
        for name, parameter in policy.trainable_parameters().items():
            noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(name)))
            parameter.add_(0.05 * noise.to(parameter))
