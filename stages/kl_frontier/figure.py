"""Figures of the frontier: scores against sqrt(KL), with fits; and learnt reward along training."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np

from stages.kl_frontier.fits import evaluate_fit
from stages.reporting.label_placement import PointLabel, place_labels

MARKERS = "osD^vPX*"
FURTHER_COLOURS = ("#8B7FD6", "#A6761D", "#7F8C8D")  # after the page's four, on a light and on a dark ground
CURVE_POINTS = 200
MARK_SIZE = 11  # of letters, in points
LEGEND_ROOM = 0.3  # of the axis, per three families, for the legend above the points


@dataclass(frozen=True)
class FrontierPoint:
    """A policy: x and y as estimates {mean, low, high}, and the mark beside it."""

    x: dict
    y: dict
    mark: str


@dataclass(frozen=True)
class FrontierFigure:
    """Points by family, with the family's fit as a line where there is one.

    fits: by family (form, a, b). optimum: the highest gain by KL, [(KL, gain), ...]. palette: of seven colours and
    their blends.
    """

    title: str
    y_label: str
    points: dict[str, list[FrontierPoint]]
    fits: dict[str, tuple[str, float, float]]
    optimum: Sequence[tuple[float, float]] = ()
    aspect: float = 0.66
    palette: int = 128

    def draw(self, axes, colours: Iterable[str]) -> None:
        """Draw points, intervals and fits on Matplotlib axes, a colour a family."""
        axes.axhline(0, linestyle=":", linewidth=1.5, color="gray")
        axes.plot([0], [0], "x", color="gray", markersize=9, markeredgewidth=2)
        labels = [PointLabel("SFT", 0, 0)]
        for (label, points), colour, marker in _styled(self.points, colours):
            self._draw_fit(axes, label, points, colour)
            for point in points:
                _draw_interval(axes, point, colour)
            labels += [PointLabel(point.mark, point.x["mean"], point.y["mean"], colour) for point in points]
            axes.plot([point.x["mean"] for point in points], [point.y["mean"] for point in points], marker,
                      color=colour, markersize=8, label=label)
        if self.optimum:
            kl, gains = zip(*self.optimum, strict=True)
            axes.plot(np.sqrt(np.maximum(kl, 0)), gains, color="gray", linestyle="--", linewidth=1.8, label="optimum")
        largest = max((point.x["mean"] for points in self.points.values() for point in points), default=1.0)
        axes.set_xlim(-0.05 * largest, 1.12 * largest)
        axes.margins(y=0.1)
        _label_axes(axes, self.y_label, len(self.points) + bool(self.optimum))
        place_labels(axes, labels, [(label.x, label.y) for label in labels], MARK_SIZE)

    def _draw_fit(self, axes, label: str, points: list[FrontierPoint], colour: str) -> None:
        if label not in self.fits:
            return
        form, a, b = self.fits[label]
        largest = max(point.x["mean"] for point in points)
        distances = np.linspace(largest / CURVE_POINTS, largest, CURVE_POINTS)
        axes.plot([0, *distances], [0, *evaluate_fit(form, a, b, distances)], color=colour, linewidth=1.6, alpha=0.8)


@dataclass(frozen=True)
class TrainingPaths:
    """Learnt reward against sqrt(KL) along training, a line a policy: [(KL, reward), ...]; the last point is marked."""

    title: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]
    aspect: float = 0.66
    palette: int = 128

    def draw(self, axes, colours: Iterable[str]) -> None:
        """Draw a line a policy on Matplotlib axes, with its last point marked."""
        for (label, points), colour, marker in _styled(self.lines, colours):
            kl, rewards = zip(*points, strict=True)
            distances = np.sqrt(np.maximum(kl, 0))
            axes.plot(distances, rewards, color=colour, linewidth=1.6)
            axes.plot(distances[-1:], rewards[-1:], marker, color=colour, markersize=9, label=label)
        _label_axes(axes, self.y_label, len(self.lines))


def _styled(items: dict, colours: Iterable[str]) -> Iterable[tuple]:
    return zip(items.items(), cycle((*colours, *FURTHER_COLOURS)), cycle(MARKERS), strict=False)


def _draw_interval(axes, point: FrontierPoint, colour: str) -> None:
    for estimate, across in ((point.x, False), (point.y, True)):
        if estimate["low"] is not None:
            ends = [estimate["low"], estimate["high"]]
            xs, ys = ([point.x["mean"]] * 2, ends) if across else (ends, [point.y["mean"]] * 2)
            axes.plot(xs, ys, color=colour, linewidth=1.4)


def _label_axes(axes, y_label: str, count: int) -> None:
    """Name the axes, and put the legend above all points; count: of its entries."""
    axes.set_xlabel("square root of the KL to SFT, in nats a response")
    axes.set_ylabel(y_label)
    if count:
        low, high = axes.get_ylim()
        axes.set_ylim(low, high + LEGEND_ROOM / 3 * -(-count // 3) * (high - low))
        axes.legend(loc="upper left", ncols=3, fontsize=12, columnspacing=1.2, handletextpad=0.3)
