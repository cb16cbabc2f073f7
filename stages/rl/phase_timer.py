"""Measure the phases of a PPO iteration."""

from collections.abc import Iterator
from contextlib import contextmanager

from stages.training.memory import PhaseCost, track_peak_memory


class PhaseTimer:
    """Seconds, tokens per second and peak memory of the phases of one iteration."""

    def __init__(self):
        self.costs: dict[str, PhaseCost] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the phase `name`. Phases cannot be nested."""
        with track_peak_memory() as self.costs[name]:
            yield

    def metrics(self, tokens: dict[str, int]) -> dict[str, float]:
        """Return NAME_seconds and NAME_tokens_per_second of each phase, and peak_memory_mib; tokens: by phase."""
        metrics: dict[str, float] = {"peak_memory_mib": round(max(c.peak_bytes for c in self.costs.values()) / 2**20)}
        for name, cost in self.costs.items():
            metrics[f"{name}_seconds"] = round(cost.seconds, 3)
            metrics[f"{name}_tokens_per_second"] = round(tokens[name] / max(cost.seconds, 1e-9))
        return metrics
