"""Figures: bins that outliers do not spoil, and axes that show their values."""

import io
import subprocess
import sys
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from stages.reporting import figures
from stages.reporting.frontier_figure import FURTHER_COLOURS, Frontier, FrontierPoint
from tests.helpers.documentation import ROOT


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


def test_an_svg_file_is_the_same_in_every_process_and_shows_a_title_as_it_is():
    figure = figures.Curves("a < b & <script>", "step", {"a": [(1, 2.0), (2, 3.0)], "b": [(1, 1.0)]})
    drawn = figures.draw_pictures(figure).svg
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg") and not list(root.iter("{http://www.w3.org/2000/svg}script"))
    program = (f"import sys; from stages.reporting.figures import *; "
               f"sys.stdout.buffer.write(draw_pictures({figure!r}).svg)")
    again = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True).stdout
    assert again == drawn


def test_both_pictures_have_the_layout_that_is_computed_once(monkeypatch):
    """Against a figure that computes its layout itself."""
    figure = figures.Curves("t", "step", {"a": [(1, 2000.0), (2, 3000.0)]}, y_label="nats")
    places, save = [], figures._save_png

    def note(canvas):
        png = save(canvas)
        places.append([axes.get_position().bounds for axes in canvas.figure.axes])
        return png

    monkeypatch.setattr(figures, "_save_png", note)
    figures.draw_pictures(figure)
    with figures._drawn(figure, dark=True) as canvas:
        canvas.draw()
        (axes,) = canvas.figure.axes
    assert places == [[axes.get_position().bounds]] * 2


@pytest.mark.parametrize("dark", [False, True])
def test_every_policy_keeps_its_colour_in_the_file(dark):
    colours = (*(figures.DARK if dark else figures.LIGHT)[2], *FURTHER_COLOURS)
    points = {f"policy {n}": [FrontierPoint(exact(0.3 * n + 0.1 * i), estimate(n + 0.1 * i), f"{n}.{i}")
                              for i in range((6, 3, 1)[min(n, 2)])] for n in range(len(colours))}
    lines = {f"policy {n}": [(0.02 * x, (0.02 * x) ** 0.5 + n) for x in range(100)] for n in range(2)}
    lines["optimum"] = [(0.02 * x, (0.02 * x) ** 0.5 + 1.5) for x in range(100)]
    drawn = figures.draw_pictures(Frontier("Score against KL", "square root of the KL", "score", points, lines))
    pixels = np.asarray(Image.open(io.BytesIO(drawn.dark if dark else drawn.light)).convert("RGB")).astype(int)
    for colour in colours:
        there = np.abs(pixels - [int(colour[at:at + 2], 16) for at in (1, 3, 5)]).sum(axis=2) < 10
        assert there.sum() > 100, colour


def estimate(mean: float) -> dict:
    return {"mean": mean, "low": mean - 0.01, "high": mean + 0.01}


def exact(mean: float) -> dict:
    return {"mean": mean, "low": None, "high": None}


def text_boxes(canvas: FigureCanvasAgg, axes, texts: list[str]) -> list:
    renderer = canvas.get_renderer()
    return [text.get_window_extent(renderer) for text in axes.texts if text.get_text() in texts]


def test_labels_lie_on_no_point_and_on_no_other_label():
    """Points of best-of-n get close to each other, and to the policies."""
    line = {f"best of {n}": (x, estimate(y)) for n, x, y in ((2, 0.2, 0.3), (4, 0.6, 0.6), (8, 0.7, 0.62))}
    others = {"PPO": (0.66, estimate(0.572)), "RLOO": (0.75, estimate(0.7))}
    points = {"best of n": [FrontierPoint(exact(x), row, name) for name, (x, row) in line.items()]} | {
        name: [FrontierPoint(exact(x), row)] for name, (x, row) in others.items()}
    with rc_context(figures.BASE):
        canvas = FigureCanvasAgg(Figure(figsize=(7, 4), dpi=figures.DPI))
        axes = canvas.figure.add_subplot()
        axes.set_title("t")
        Frontier("t", "x", "y", points).draw(axes, figures.LIGHT[2])
        canvas.draw()
        boxes = text_boxes(canvas, axes, list(line))
        centres = [axes.transData.transform((x, row["mean"])) for x, row in (line | others).values()]
    assert len(boxes) == 3
    assert not [box for box in boxes for x, y in centres if box.x0 < x < box.x1 and box.y0 < y < box.y1]
    assert sum(box.count_overlaps(boxes) for box in boxes) == 3, "each overlaps itself alone"
