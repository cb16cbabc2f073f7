"""Preference pairs of a question, and the split that a question belongs to: functions of seed, site and question id."""

import hashlib
import random
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def pairs_of(scores: Sequence[int], limit: int, seed: int, site: str, question_id: int, min_gap: int = 1
             ) -> list[tuple[int, int]]:
    """At most `limit` pairs (better, worse) of positions in `scores`, drawn without replacement.

    The scores of a pair differ by `min_gap` (1 or more) at least.

    Pairs are numbered without being built: 10,000 answers have 50 million. In the order of their numbers: best first.
    """
    order = sorted(range(len(scores)), key=lambda i: -scores[i])  # stable: equal scores keep the answers' order
    falling = [-scores[i] for i in order]
    first_worse = [bisect_left(falling, score + min_gap) for score in falling]
    through = list(accumulate(len(order) - first for first in first_worse))  # pairs of the best, of the best two, ...
    total = through[-1] if through else 0
    numbers = range(total)
    if total > limit:
        numbers = sorted(random.Random(_hash("pairs", seed, site, question_id)).sample(numbers, limit))
    return [_pair(number, order, first_worse, through) for number in numbers]


def _pair(number: int, order: list[int], first_worse: list[int], through: list[int]) -> tuple[int, int]:
    better = bisect_left(through, number + 1)
    before = through[better - 1] if better else 0
    return order[better], order[first_worse[better] + number - before]


def split_of(site: str, question_id: int, shares: dict[str, float], seed: int) -> str:
    """The name in `shares` (relative sizes, at least one above 0) that this question falls to."""
    point = _hash("split", seed, site, question_id) / 2**64 * sum(shares.values())
    for name, share in shares.items():
        point -= share
        if point < 0:
            return name
    return max(name for name, share in shares.items() if share > 0)  # only float rounding comes here


def _hash(purpose: str, seed: int, site: str, question_id: int) -> int:
    """64 bits, the same in every process (Python's hash() is not)."""
    text = f"{purpose}\n{seed}\n{site}\n{question_id}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
