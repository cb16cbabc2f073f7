"""Plan checkpoints: how many there are, when one is due by time, and what they take on the disk."""

import math
from collections.abc import Iterable
from pathlib import Path
from time import monotonic

import torch

from stages.runtime.files import check_free_space, used_bytes
from stages.runtime.processes import is_main
from stages.training.checkpoint import list_checkpoints
from stages.training.optimizers import optimizer_state_bytes

KEEP_CHECKPOINTS = 2  # the newest ones


def check_training_space(out: Path, parameters: Iterable[torch.nn.Parameter], *, optimizer: str, saves: int,
                         keeps_best: bool, checkpoints: Path, keep_checkpoints: int = KEEP_CHECKPOINTS) -> None:
    """Raise ValueError if the disk of `out` has no room for the checkpoints of a training and its result.

    At most `keep_checkpoints`, one that is being written, and the result are there at once. What an earlier attempt has
    left counts as theirs.

    Args:
        parameters: those that are saved; only those that require gradients have optimizer state.
        saves: number of checkpoints that will be written, at most.
        keeps_best: the best weights so far are saved, too: with each checkpoint, and beside them.
        checkpoints: folder of the checkpoints.
    """
    needed_bytes = training_bytes(parameters, optimizer=optimizer, saves=saves, keep_checkpoints=keep_checkpoints,
                                  keeps_best=keeps_best)
    check_free_space("checkpoints and weights", out, needed_bytes - used_bytes(*list_checkpoints(checkpoints)))


def training_bytes(parameters: Iterable[torch.nn.Parameter], *, optimizer: str, saves: int, keep_checkpoints: int,
                   keeps_best: bool) -> int:
    """Return the most bytes that a training has on the disk at once; arguments as in `check_training_space`."""
    parameters = list(parameters)
    weights_bytes = sum(p.nbytes for p in parameters) * (1 + keeps_best)
    state_bytes = optimizer_state_bytes(optimizer, (p for p in parameters if p.requires_grad))
    return min(saves, keep_checkpoints + 1) * (weights_bytes + state_bytes) + weights_bytes


def checkpoint_interval(every: int, every_minutes: float | None) -> int:
    """Return the least number of steps or iterations between two checkpoints: by time, one may follow each.

    Args:
        every: of them, after which a checkpoint is written.
        every_minutes: after which one is, too; None: never.
    """
    return 1 if every_minutes else every


def count_saves(items: int, batch: int, epochs: float, max_steps: int | None, every_steps: int) -> int:
    """Return the number of checkpoints of a training on so many items; the Trainer also writes one at the end."""
    return math.ceil((max_steps or items * epochs / batch) / every_steps)


class CheckpointTimer:
    """Measure the time since the last checkpoint.

    Of several processes, the first one's clock counts: two clocks would decide differently about a step, and processes
    that save would wait for others that do not. The caller tells all processes (group.any_process_each).

    Args:
        minutes: None: by time, none is ever due.
    """

    def __init__(self, minutes: float | None):
        self.minutes = minutes
        self.restart()

    def restart(self) -> None:
        """Begin anew: a checkpoint was saved just now."""
        self.saved_at = monotonic()

    def is_due(self) -> bool:
        """Check whether the time is over; never in other processes than the first one."""
        return self.minutes is not None and is_main() and monotonic() - self.saved_at >= 60 * self.minutes
