"""Tell when a checkpoint is due by time: `save_every_minutes` after the last one, or after the start of training."""

from time import monotonic

from stages.runtime.processes import is_main


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
