"""Figures: bins that outliers do not spoil, and axes that show their values."""

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from stages.reporting import figures


def test_outliers_do_not_push_all_other_answers_into_two_bars():
    values = [*np.random.default_rng(0).normal(size=500), 400.0, -400.0]
    edges = figures.Histogram("t", "x", {"a": values}).bin_edges()
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    assert counts.sum() == 502, "outliers are counted, in the outermost bins"
    assert (counts > 5).sum() > 15


@pytest.mark.parametrize("values", [[2.0], [2.0, 2.0, 2.0], [0.0] * 500 + [1.0]])
def test_bins_have_a_width_whatever_the_values(values):
    edges = figures.Histogram("t", "x", {"a": values}).bin_edges()
    assert (np.diff(edges) > 0).all()
    assert np.histogram(np.clip(values, edges[0], edges[-1]), edges)[0].sum() == len(values)


def test_an_axis_shows_values_and_not_their_distance_from_an_offset():
    with rc_context(figures.BASE):
        canvas = FigureCanvasAgg(Figure())
        axes = canvas.figure.add_subplot()
        figures.Curves("t", "step", {"a": [(1, 5000.001), (2, 5000.002)]}).draw(axes, ("black",))
        canvas.draw()
        assert axes.yaxis.get_offset_text().get_text() == ""
        assert axes.get_yticklabels()[1].get_text().startswith("5000.00")
