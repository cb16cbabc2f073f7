"""A module whose checkpoints hold some of its parameters only: a frozen base model is not saved again and again."""

from collections.abc import Mapping

import torch
from torch import nn


class PartialState(nn.Module):
    """A module whose state is its parameters that are trained, and those that `is_updated` names.

    Parameters that are tied are saved once.
    """

    def is_updated(self, name: str) -> bool:
        """Check whether a parameter changes in training although it has no gradient."""
        return False

    def saved_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters of a checkpoint by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad or self.is_updated(name)}

    def state_dict(self, *args, **kwargs) -> dict[str, torch.Tensor]:
        return {name: p.detach() for name, p in self.saved_parameters().items()}

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True, assign: bool = False):
        """Load a state; KeyError or RuntimeError unless it is whole and fits, whatever `strict` is."""
        with torch.no_grad():
            for name, parameter in self.saved_parameters().items():
                parameter.copy_(state_dict[name])
        return nn.modules.module._IncompatibleKeys([], sorted(set(state_dict) - set(self.saved_parameters())))
