"""Refuse weights that are not finite, where they are read and where they are published."""

from collections.abc import Iterable

import torch

DIVERGED = "training diverged, and nothing is published: lower the learning rate"


def check_finite(weights: Iterable[tuple[str, torch.Tensor]], what: str) -> None:
    """Raise ValueError, beginning with `what`, if a weight has NaN or infinity.

    weights: pairs of name and tensor; the integers of quantised weights are always finite.
    """
    for name, weight in weights:
        if weight.is_floating_point() and weight.numel():
            low, high = weight.detach().aminmax()  # NaN propagates; no copy of the weight is made
            if not (torch.isfinite(low) and torch.isfinite(high)):
                raise ValueError(f"{what}: {name} has values that are not finite")
