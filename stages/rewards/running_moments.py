"""Running mean and standard deviation over batches, from one process or several, resumable."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass
class RunningMoments:
    """Count, mean and sum of squared deviations in float64, merged exactly (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "RunningMoments":
        """Compute the moments of one batch."""
        values = [float(value) for value in values]
        mean = math.fsum(values) / len(values) if values else 0.0
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    def merge(self, other: "RunningMoments") -> None:
        """Add the moments of another batch, or of another process."""
        count = self.count + other.count
        if not count:
            return
        difference = other.mean - self.mean
        self.squares += other.squares + difference**2 * self.count * other.count / count
        self.mean += difference * other.count / count
        self.count = count

    def std(self) -> float | None:
        """Return the standard deviation (over n - 1, as TRL and trlX); None for fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None

    def state(self) -> dict[str, float]:
        """Return plain numbers for a checkpoint."""
        return asdict(self)

    def restore(self, state: dict[str, float]) -> None:
        """Continue from `state`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
