"""Which kernels beside torch's own a model computes with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kernels:
    """Settings named as in the recipe: 'auto', where they can be used and agree with the model, or 'off'.

    cpu_kernels: this project's, on a CPU. liger_kernels: Liger's, on a GPU.
    """

    cpu_kernels: str = "off"
    liger_kernels: str = "off"


TORCH_ONLY = Kernels()
