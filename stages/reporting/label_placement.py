"""Place labels beside points, so that none lies on a point, an interval or another label."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

DISTANCES = (9, 15, 22, 30)  # in points, the nearest first
DIRECTIONS = ((1, -1), (-1, 1), (1, 1), (-1, -1), (0, 1), (0, -1), (1, 0), (-1, 0))
MARKER = 5  # half the width of a marker, in points
LABEL_WEIGHT, OUTSIDE_WEIGHT = 3, 10  # of an overlap with a label and with the edge, where one with a point has 1


class PointLabel(NamedTuple):
    """A text beside a point, in the coordinates of the data."""

    text: str
    x: float
    y: float
    colour: str | None = None


def place_labels(axes, labels: Sequence[PointLabel], obstacles: Iterable[tuple[float, float]], font_size: float
                 ) -> None:
    """Draw each label at the nearest place that is free of obstacles and of the labels before it.

    obstacles: points, of which each takes the room of a marker. Call it last: the limits of the axes must not move.
    """
    figure = axes.figure
    figure.draw_without_rendering()  # the layout decides where points are
    renderer = figure.canvas.get_renderer()
    pixels = figure.dpi / 72
    points = [_box(*axes.transData.transform(point), MARKER * pixels) for point in obstacles]
    legend = axes.get_legend()
    taken: list[Bbox] = [legend.get_window_extent(renderer)] if legend else []
    for label in labels:
        text = axes.annotate(
            label.text, (label.x, label.y), xytext=(0, 0), textcoords="offset points", fontsize=font_size,
            color=label.colour, va="center", ha="center", zorder=5, in_layout=False,
            path_effects=[withStroke(linewidth=3, foreground=axes.get_facecolor())])
        own = text.get_window_extent(renderer)
        offsets = [(right * (distance + own.width / pixels / 2 - 2 * MARKER / 3),
                    up * (distance + own.height / pixels / 2 - 2 * MARKER / 3))
                   for distance in DISTANCES for right, up in DIRECTIONS]
        best = min(offsets, key=lambda offset: _cost(own, offset, pixels, points, taken, axes.bbox))
        text.set_position(best)
        taken.append(own.translated(best[0] * pixels, best[1] * pixels))


def _cost(own: Bbox, offset: tuple[float, float], pixels: float, points: list[Bbox], taken: list[Bbox], inside: Bbox
          ) -> float:
    box = own.translated(offset[0] * pixels, offset[1] * pixels)
    is_outside = box.x0 < inside.x0 or box.x1 > inside.x1 or box.y0 < inside.y0 or box.y1 > inside.y1
    return (box.count_overlaps(points) + LABEL_WEIGHT * box.count_overlaps(taken) + OUTSIDE_WEIGHT * is_outside)


def _box(x: float, y: float, half: float) -> Bbox:
    return Bbox.from_extents(x - half, y - half, x + half, y + half)
