"""Figures of a run as PNG, light and dark. Colours of Okabe and Ito, which most colour-blind readers can tell apart."""

import io
from dataclasses import dataclass

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

ASPECT = 0.56
DPI = 110
# A figure has a few colours and their blends: with so many, a third of the bytes and no difference to see. Browsers
# refuse an embedded page of over 2 MB, which is how Snakemake's own report holds ours.
PALETTE = 64
# Each figure is shown at about half its width, on a phone as on a desk: letters are drawn that much larger.
BASE = {"font.family": "DejaVu Sans", "font.size": 15, "axes.titlesize": 16, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "lines.linewidth": 2.4, "legend.frameon": False, "figure.constrained_layout.use": True}
LIGHT = ("#ffffff", "#24292f", ("#0072B2", "#D55E00", "#009E73", "#CC79A7"))
DARK = ("#1c1f24", "#d7dbe0", ("#56B4E9", "#E69F00", "#2FC79A", "#E5A3C7"))
DASHES = ("-", "--", "-.", ":")
MOST_TICKS = 9
FEW_LINES = 2  # find room for their legend between them


@dataclass(frozen=True)
class Curves:
    """Lines over one axis: label to [(x, y), ...]."""

    title: str
    x_label: str
    lines: dict[str, list[tuple[float, float]]]
    limits: tuple[float, float] | None = None  # of y, where the whole range tells more than what was reached of it

    def draw(self, axes, colours) -> None:
        for (label, points), colour, dash in zip(self.lines.items(), colours, DASHES, strict=False):
            axes.plot(*zip(*points, strict=True), dash, color=colour, label=label,
                      marker="o" if len(points) < 30 else None, markersize=5)
        axes.set_xlabel(self.x_label)
        axes.xaxis.get_major_locator().set_params(integer=True)  # there is no half step
        if self.limits:
            axes.set_ylim(*self.limits)
        if 1 < len(self.lines) <= FEW_LINES:
            axes.legend()
        elif len(self.lines) > FEW_LINES:
            low, high = axes.get_ylim()
            axes.set_ylim(low, high + 0.4 * (high - low))
            axes.legend(loc="upper left", ncols=2)


@dataclass(frozen=True)
class Intervals:
    """Estimates (mean, low, high) beside one another; a line at `reference`."""

    title: str
    x_label: str
    rows: dict[str, dict]
    reference: float

    def draw(self, axes, colours) -> None:
        for place, found in enumerate(self.rows.values()):
            low, high = (found["mean"] if found[end] is None else found[end] for end in ("low", "high"))
            colour = colours[0] if place == 0 else colours[1]
            axes.plot([low, high], [place, place], color=colour)
            axes.plot([found["mean"]], [place], "o", color=colour, markersize=9)
        axes.axvline(self.reference, linestyle=":", color="gray")
        axes.set_yticks(range(len(self.rows)), list(self.rows))
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        axes.set_xlabel(self.x_label)


@dataclass(frozen=True)
class Histogram:
    """How often each value comes up: label to values."""

    title: str
    x_label: str
    values: dict[str, list[float]]

    def draw(self, axes, colours) -> None:
        every = [value for values in self.values.values() for value in values]
        low, high = min(every), max(every)
        edges = [low + (high - low or 1) * i / 24 for i in range(25)]
        for (label, values), colour, dash in zip(self.values.items(), colours, DASHES, strict=False):
            axes.hist(values, edges, histtype="step", color=colour, linestyle=dash, linewidth=2.4, label=label)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel("answers")
        axes.legend()


@dataclass(frozen=True)
class Bars:
    """Counts that were made before: value to how often, in order."""

    title: str
    x_label: str
    y_label: str
    counts: dict[str, int]

    def draw(self, axes, colours) -> None:
        axes.bar(range(len(self.counts)), list(self.counts.values()), color=colours[0])
        every = -(-len(self.counts) // MOST_TICKS)
        axes.set_xticks(range(0, len(self.counts), every), list(self.counts)[::every])
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)


@dataclass(frozen=True)
class Frontier:
    """(x, estimate) by name: a yardstick as one line, and what is held against it; each with its interval."""

    title: str
    x_label: str
    y_label: str
    line: dict[str, tuple[float, dict]]
    others: dict[str, tuple[float, dict]]

    def draw(self, axes, colours) -> None:
        axes.plot(*zip(*((x, found["mean"]) for x, found in self.line.values()), strict=True), color=colours[0])
        for name, (x, found) in self.line.items():
            self._point(axes, x, found, "o", colours[0])
            axes.annotate(name, (x, found["mean"]), xytext=(8, -14), textcoords="offset points", fontsize=12)
        for (name, (x, found)), marker, colour in zip(self.others.items(), "sD^", colours[1:], strict=False):
            self._point(axes, x, found, marker, colour, name)  # in a legend: it may lie on the line's beginning
        axes.margins(x=0.16, y=0.12)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        if self.others:
            axes.legend(loc="lower right")

    def _point(self, axes, x: float, found: dict, marker: str, colour: str, label: str | None = None) -> None:
        low, high = (found["mean"] if found[end] is None else found[end] for end in ("low", "high"))
        axes.plot([x, x], [low, high], color=colour)
        axes.plot([x], [found["mean"]], marker, color=colour, markersize=9, label=label)


@dataclass(frozen=True)
class Reliability:
    """How often a judge is right [(how sure it is, how often it is right, of how many)], beside how often it should."""

    title: str
    bins: list[tuple[float, float, int]]

    def draw(self, axes, colours) -> None:
        sure, right, counts = zip(*self.bins, strict=True)
        axes.plot([0.5, 1], [0.5, 1], ":", color="gray", label="as sure as right")
        axes.plot(sure, right, "-", color=colours[0], label="reward model")
        axes.scatter(sure, right, [20 + 280 * count / max(counts) for count in counts], color=colours[0])
        axes.set_xlabel("how sure: sigmoid of the difference in reward")
        axes.set_ylabel("share right")
        axes.legend()


Drawn = Curves | Intervals | Histogram | Bars | Frontier | Reliability


def png(figure: Drawn, width_inches: float, dark: bool) -> bytes:
    """One figure as a PNG file; the same figure gives the same bytes."""
    ground, ink, colours = DARK if dark else LIGHT
    inked = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    with matplotlib.rc_context({**BASE, **inked, "axes.facecolor": ground, "figure.facecolor": ground}):
        drawn = Figure(figsize=(width_inches, getattr(figure, "aspect", ASPECT) * width_inches), dpi=DPI)
        FigureCanvasAgg(drawn)
        axes = drawn.add_subplot()
        figure.draw(axes, colours)
        axes.set_title(figure.title)
        drawn.canvas.draw()
        pixels = Image.frombytes("RGBA", drawn.canvas.get_width_height(), drawn.canvas.buffer_rgba())
    stream = io.BytesIO()
    pixels.convert("RGB").quantize(PALETTE, dither=Image.Dither.NONE).save(stream, "png", optimize=True)
    return stream.getvalue()
