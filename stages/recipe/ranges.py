"""Ranges of numeric settings, each finite at both ends: what lies outside is a mistake, or would fail hours later.

A limit whose upper end is large means "all" or "never" at that end.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """An interval; `above` excludes its lower end, `below` its upper one."""

    low: float
    high: float
    above: bool = False
    below: bool = False

    def __contains__(self, number: float) -> bool:
        return ((self.low < number if self.above else self.low <= number)
                and (number < self.high if self.below else number <= self.high))  # NaN is in no range

    def __str__(self) -> str:
        """Format as 'from 0 to below 1'."""
        return f"{'above' if self.above else 'from'} {self.low:,} to {'below ' if self.below else ''}{self.high:,}"


COUNT = Range(1, 10**12)
COUNT_OR_NONE = Range(0, 10**12)
BATCH = Range(1, 10**6)  # items in memory at once
TOKENS = Range(1, 10**7)  # of one sequence
BLOCK = Range(2, 10**7)  # tokens of a packed block; of a single one, nothing would be predicted
WIDTH = Range(1, 10**6)  # of a layer
BYTES = Range(1, 10**15)
SEED = Range(0, 2**31 - 1)  # NumPy takes 32 bits, and members of a reward model count on from it
LEARNING_RATE = Range(0, 10, above=True)
DECAY = Range(0, 10)
EPOCHS = Range(0, 10**6, above=True)
TEMPERATURE = Range(0, 100, above=True)
SHARE = Range(0, 1)
SHARE_BELOW_ALL = Range(0, 1, below=True)
COEFFICIENT = Range(0, 10**6)
POSITIVE = Range(0, 10**6, above=True)
SIGNED = Range(-(10**6), 10**6)
