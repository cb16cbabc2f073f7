"""Mean and spread of numbers that come batch by batch, from one process or several, and live through a resume."""

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass


@dataclass
class RunningMoments:
    """Count, mean and summed squared deviations, in float64; two are merged exactly (Chan, Golub, LeVeque 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> "RunningMoments":
        """Those of one batch."""
        values = [float(value) for value in values]
        mean = math.fsum(values) / len(values) if values else 0.0
        return cls(len(values), mean, math.fsum((value - mean) ** 2 for value in values))

    def merge(self, other: "RunningMoments") -> None:
        """Take the numbers behind `other` in as well: a batch's, or another process's."""
        count = self.count + other.count
        if not count:
            return
        apart = other.mean - self.mean
        self.squares += other.squares + apart**2 * self.count * other.count / count
        self.mean += apart * other.count / count
        self.count = count

    def std(self) -> float | None:
        """Standard deviation (n - 1, as TRL and trlX); None while there are fewer than two numbers."""
        return math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else None

    def state(self) -> dict[str, float]:
        """Plain numbers for a checkpoint's JSON."""
        return asdict(self)

    def restore(self, state: dict[str, float]) -> None:
        """Go on from `state`."""
        self.count, self.mean, self.squares = int(state["count"]), float(state["mean"]), float(state["squares"])
