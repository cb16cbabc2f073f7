"""Bins of histograms: lengths are counted in fine bins, and a table chooses how coarsely it shows them.

Fixed powers of two would show the questions of a site in two bars where most have 100 to 250 characters.
"""

from bisect import bisect_right
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from math import ceil

BINS_PER_OCTAVE = 8  # of counted lengths: from a length to twice that length
MAX_OCTAVES = 48
Bins = list[tuple[int, int, int]]  # first value, last value, count


def bin_start(length: int) -> int:
    """Return the lower end of the bin of a length: a bin's ends have one ratio, as far as whole numbers allow."""
    edges = _octave_edges(BINS_PER_OCTAVE)
    return edges[bisect_right(edges, length) - 1]


def bin_lengths(counts: Mapping[int, int], max_bins: int) -> Bins:
    """Sum counts of lengths into the narrowest bins that are at most `max_bins`, or into powers of two."""
    powers_of_two = all(length & (length - 1) == 0 for length in counts)  # older artifacts counted no finer
    for bins_per_octave in (1,) if powers_of_two else (8, 4, 2, 1):
        edges = _octave_edges(bins_per_octave)
        edges = edges[bisect_right(edges, min(counts)) - 1:bisect_right(edges, max(counts)) + 1]
        if len(edges) <= max_bins + 1:
            break
    return _sum_counts(counts, edges)


@cache
def _octave_edges(bins_per_octave: int) -> list[int]:
    """Return 0 and the powers of 2 ** (1 / bins_per_octave), rounded up; those of fewer bins are among them."""
    return sorted({0, *(ceil(2 ** (power / bins_per_octave)) for power in range(MAX_OCTAVES * bins_per_octave))})


def _sum_counts(counts: Mapping[int, int], edges: list[int]) -> Bins:
    sums = [0] * (len(edges) - 1)
    for value, count in counts.items():
        sums[bisect_right(edges, value) - 1] += count
    return [(first, end - 1, total) for (first, end), total in zip(pairwise(edges), sums, strict=True)]
