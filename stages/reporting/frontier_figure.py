"""Draw the figure of scores against KL: points by family, with intervals, lines, and labels that overlap nothing."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import NamedTuple

from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from stages.reporting.figures import LEGEND_SIZE, add_legend, interval_ends

MARKERS = "osD^vPX*"
FURTHER_COLOURS = ("#8B7FD6", "#A6761D", "#7F8C8D")  # after the page's four, on a light and on a dark ground
DISTANCES = (9, 15, 22, 30)  # of a label from its point, in points, the nearest first
DIRECTIONS = ((1, -1), (-1, 1), (1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
MARKER = 5  # half the width of a marker, in points
LABEL_WEIGHT, OUTSIDE_WEIGHT = 3, 10  # of an overlap with a label and with the edge, where one with a point has 1


class FrontierPoint(NamedTuple):
    """A policy: x and y as estimates {mean, low, high}, and the words beside it."""

    x: dict
    y: dict
    label: str = ""


@dataclass(frozen=True)
class Frontier:
    """Points by family, each with its intervals.

    lines: [(x, y), ...] by family, in its colour; any other line is gray, dashed and named in the legend.
    """

    title: str
    x_label: str
    y_label: str
    points: dict[str, list[FrontierPoint]]
    lines: dict[str, Sequence[tuple[float, float]]] = field(default_factory=dict)

    def draw(self, axes, colours) -> None:
        """Draw the figure on Matplotlib axes, a colour and a marker a family."""
        styles = zip(self.points.items(), cycle((*colours, *FURTHER_COLOURS)), cycle(MARKERS), strict=False)
        labels, obstacles = [], []
        for (family, points), colour, marker in styles:
            for point in points:
                axes.plot([point.x["mean"]] * 2, interval_ends(point.y), color=colour, linewidth=1.4)
                axes.plot(interval_ends(point.x), [point.y["mean"]] * 2, color=colour, linewidth=1.4)
            centres = [(point.x["mean"], point.y["mean"]) for point in points]
            obstacles += [(point.x["mean"], y) for point in points for y in (point.y["mean"], *interval_ends(point.y))]
            labels += [(point.label, centre, colour) for point, centre in zip(points, centres, strict=True)
                       if point.label]
            axes.plot(*zip(*centres, strict=True), marker, color=colour, markersize=9, label=family)
            if family in self.lines:
                axes.plot(*zip(*self.lines[family], strict=True), color=colour, linewidth=1.6)
        for name in (name for name in self.lines if name not in self.points):
            axes.plot(*zip(*self.lines[name], strict=True), color="gray", linestyle="--", linewidth=1.8, label=name)
        axes.margins(x=0.1, y=0.1)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        add_legend(axes)
        _place_labels(axes, labels, obstacles)


def _place_labels(axes, labels: list[tuple[str, tuple[float, float], str]], obstacles: list[tuple[float, float]]
                  ) -> None:
    """Draw each (text, point, colour) at the nearest place that is free of obstacles and of the labels before it.

    Call it last: the limits of the axes must not move.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # the layout decides where points are
    renderer = figure.canvas.get_renderer()
    pixels = figure.dpi / 72
    half = MARKER * pixels
    centres = axes.transData.transform(obstacles)
    points = [Bbox.from_extents(x - half, y - half, x + half, y + half) for x, y in centres]
    legend = axes.get_legend()
    taken: list[Bbox] = [legend.get_window_extent(renderer)] if legend else []
    for words, point, colour in labels:
        text = axes.annotate(
            words, point, xytext=(0, 0), textcoords="offset points", fontsize=LEGEND_SIZE, color=colour, va="center",
            ha="center", zorder=5, in_layout=False,
            path_effects=[withStroke(linewidth=3, foreground=axes.get_facecolor())])
        own = text.get_window_extent(renderer)
        offsets = [(right * (distance + own.width / pixels / 2 - 2 * MARKER / 3),
                    up * (distance + own.height / pixels / 2 - 2 * MARKER / 3))
                   for distance in DISTANCES for right, up in DIRECTIONS]
        boxes = {offset: own.translated(offset[0] * pixels, offset[1] * pixels) for offset in offsets}
        best = min(boxes, key=lambda offset: _cost(boxes[offset], points, taken, axes.bbox))
        text.set_position(best)
        taken.append(boxes[best])


def _cost(box: Bbox, points: list[Bbox], taken: list[Bbox], inside: Bbox) -> float:
    is_outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
    return box.count_overlaps(points) + LABEL_WEIGHT * box.count_overlaps(taken) + OUTSIDE_WEIGHT * is_outside
