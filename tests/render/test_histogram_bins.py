"""Bins: chosen from the values, so that no histogram of a site collapses into two bars."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from stages.render.histogram_bins import bin_integers, bin_lengths, bin_start, clip_tails
from stages.render.markdown_tables import format_histogram
from stages.reporting.sections import MAX_BARS, build_histograms


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
    outlier = {"30000": 1}
    bars = build_histograms("posts", {"question_characters": {str(n): c for n, c in counts.items()} | outlier})[
        "posts-question-characters"].counts
    assert sum(bars.values()) == 5001 and len(bars) <= MAX_BARS
    assert sum(count > 10 for count in bars.values()) >= (3 if spread < 0.1 else 6)
    rows = format_histogram(counts, ["characters", "questions"], binned=True).splitlines()[2:-1]
    assert sum("█" in row for row in rows) >= (3 if spread < 0.1 else 6)


def test_scores_of_a_real_site_are_few_bars_and_none_is_lost():
    counts = {str(score): 100_000 // (1 + abs(score)) ** 2 for score in range(-20, 300)} | {"4000": 1}
    figure = build_histograms("posts", {"scores": counts})["posts-scores"]
    assert sum(figure.counts.values()) == sum(counts.values())
    assert sum(count > 100 for count in figure.counts.values()) >= 10 and len(figure.counts) <= MAX_BARS
    assert "the outermost" in figure.x_label


def test_few_values_have_a_bar_each_and_gaps_are_shown():
    figure = build_histograms("posts", {"years": {"2021": 5, "2023": 7, "unknown": 1}})["posts-years"]
    assert figure.counts == {"2021": 5, "2022": 0, "2023": 7, "unknown": 1} and figure.x_label == "year"
    assert build_histograms("posts", {"years": {"unknown": 1}})["posts-years"].counts == {"unknown": 1}


def test_counts_of_older_artifacts_are_shown_by_powers_of_two():
    assert bin_lengths({64: 1207, 128: 6793}, 24) == [(64, 127, 1207), (128, 255, 6793)]
    assert bin_lengths({0: 1, 4: 2}, 24) == [(0, 0, 1), (1, 1, 0), (2, 3, 0), (4, 7, 2)]


def test_bins_cover_every_value_once():
    for counts in ({5: 1}, {0: 1}, {3: 2, 900: 1}, {n * n: n for n in range(1, 60)}):
        for bins in (bin_lengths(counts, 10), bin_integers(counts, 10)):
            assert sum(count for _, _, count in bins) == sum(counts.values())
            assert all(last + 1 == first for (_, last, _), (first, _, _) in pairwise(bins))
            assert bins[0][0] <= min(counts) and bins[-1][1] >= max(counts)
    assert clip_tails({1: 1, 50: 98, 9000: 1}) == {1: 1, 50: 99}
