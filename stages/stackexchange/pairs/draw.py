"""Draw a question's preference pairs and its split, from seed, site and question id; compare dates of answers."""

import hashlib
import math
import random
from bisect import bisect_left
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import accumulate

import numpy as np


def draw_pairs(scores: Sequence[int], limit: int, seed: int, site: str, question_id: int, min_gap: int = 1,
               times: Sequence[float] | None = None) -> list[tuple[int, int]]:
    """Draw at most `limit` pairs (better, worse) of indices into `scores`, without replacement, best first.

    The scores of a pair differ by at least `min_gap` (1 or more). Pairs are numbered without being built: 10,000
    answers have 50 million.

    Args:
        times: when each answer was written; then only pairs are drawn whose better answer is the later one (the rule of
            SHP: Ethayarajh et al. 2022). An answer whose time is NaN is in no pair.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: equal scores keep the answers' order
    negated = [-scores[i] for i in order]
    first_worse = [bisect_left(negated, score + min_gap) for score in negated]
    ordered_times = None if times is None else np.array(times, dtype=float)[order]

    def positions_of_worse(better: int) -> Sequence[int]:
        positions = range(first_worse[better], len(order))
        if ordered_times is None:
            return positions
        return positions.start + np.flatnonzero(ordered_times[positions.start:] < ordered_times[better])

    # Number of pairs of the best, of the best two, ...
    cumulative = list(accumulate(len(positions_of_worse(better)) for better in range(len(order))))
    total = cumulative[-1] if cumulative else 0
    numbers = range(total)
    if total > limit:
        numbers = sorted(random.Random(_hash("pairs", seed, site, question_id)).sample(numbers, limit))
    return [(order[better], order[positions_of_worse(better)[offset]])
            for better, offset in (_locate(number, cumulative) for number in numbers)]


def _locate(number: int, cumulative: list[int]) -> tuple[int, int]:
    """Return the position of a pair's better answer, and which of its pairs it is."""
    better = bisect_left(cumulative, number + 1)
    return better, number - (cumulative[better - 1] if better else 0)


def assign_split(site: str, question_id: int, shares: dict[str, float], seed: int) -> str:
    """Draw a question's split: a name in `shares` (relative sizes, at least one above 0)."""
    point = _hash("split", seed, site, question_id) / 2**64 * sum(shares.values())
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return max(name for name, share in shares.items() if share > 0)  # reached only by float rounding


def _hash(purpose: str, seed: int, site: str, question_id: int) -> int:
    """Hash to 64 bits, the same in every process (unlike Python's hash())."""
    text = f"{purpose}\n{seed}\n{site}\n{question_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def parse_seconds(date: str | None) -> float:
    """Parse an ISO 8601 date to seconds since 1970, UTC where it names no zone; NaN if it is none."""
    try:
        written = datetime.fromisoformat(date or "")
    except ValueError:
        return math.nan
    return (written if written.tzinfo else written.replace(tzinfo=UTC)).timestamp()


def better_is_later(row: dict) -> bool:
    """Check whether the better answer of a row of the pairs table was written later; False where a date is unknown."""
    return parse_seconds(row.get("date_j")) > parse_seconds(row.get("date_k"))
