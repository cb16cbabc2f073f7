"""Bins: chosen from the values, so that no histogram of a site collapses into two bars."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from stages.render.histogram_bins import bin_lengths, bin_start
from stages.render.markdown_tables import format_histogram


def test_the_ends_of_a_bin_have_one_ratio():
    """Bins that are wider from each power of two on would look like peaks there."""
    assert [bin_start(n) for n in (0, 1, 7, 10, 64, 69, 70, 255, 256, 2**40 + 1)] == [
        0, 1, 7, 10, 64, 64, 70, 235, 256, 2**40]
    starts = sorted({bin_start(n) for n in range(64, 4096)})
    assert all(1.07 < second / first < 1.11 for first, second in pairwise(starts)) and len(starts) == 48


@pytest.mark.parametrize("typical, spread", [(130, 0.15), (900, 0.8), (40, 0.06)])
def test_lengths_of_questions_give_more_than_two_bars(typical, spread):
    """The bundled site's questions have 100 to 250 characters: two powers of two."""
    draw = random.Random(0)
    counts = Counter(bin_start(round(typical * draw.lognormvariate(0, spread))) for _ in range(5000))
    rows = format_histogram(counts, ["characters", "questions"], binned=True).splitlines()[2:-1]
    assert sum("█" in row for row in rows) >= (3 if spread < 0.1 else 6)


def test_counts_of_older_artifacts_are_shown_by_powers_of_two():
    assert bin_lengths({64: 1207, 128: 6793}, 24) == [(64, 127, 1207), (128, 255, 6793)]
    assert bin_lengths({0: 1, 4: 2}, 24) == [(0, 0, 1), (1, 1, 0), (2, 3, 0), (4, 7, 2)]


def test_bins_cover_every_value_once():
    for counts in ({5: 1}, {0: 1}, {3: 2, 900: 1}, {n * n: n for n in range(1, 60)}):
        bins = bin_lengths(counts, 10)
        assert sum(count for _, _, count in bins) == sum(counts.values())
        assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(bins))
        assert bins[0][0] <= min(counts) and bins[-1][1] >= max(counts)
