"""Draw figures as PNG, light and dark, and SVG, in the colours of Okabe and Ito (safe for most colour-blind eyes)."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import NamedTuple, Protocol

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from PIL import Image

from stages.render.html import Html, element, picture

WIDTH_INCHES, ASPECT = 7.0, 0.56
DPI = 110
# A figure has a few colours and their blends: 64 take a third of the bytes and look the same. An octree keeps a colour
# of few pixels, which the median cut replaces. Snakemake's own report embeds our figures, and browsers refuse an
# embedded page of over 2 MB.
PALETTE = 64
# A figure is shown at about half its width: letters are drawn that much larger.
BASE = {"font.family": "DejaVu Sans", "font.size": 15, "axes.titlesize": 16, "axes.titlelocation": "left",
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
        "lines.linewidth": 2.4, "legend.frameon": False, "figure.constrained_layout.use": True,
        "axes.formatter.useoffset": False, "svg.hashsalt": ""}  # else the ids in an SVG file are random
LIGHT = ("#ffffff", "#24292f", ("#0072B2", "#D55E00", "#009E73", "#CC79A7"))
DARK = ("#1c1f24", "#d7dbe0", ("#56B4E9", "#E69F00", "#2FC79A", "#E5A3C7"))
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))  # one more than colours, so that pairs of them differ longer
FEW_LINES = 2  # more need room for their legend above them
LEGEND_COLUMNS, LEGEND_SIZE = 3, 12
LEGEND_ROOM = 0.14  # of the axis, a row of a legend above the lines
HISTOGRAM_BINS = 24
HISTOGRAM_TAIL = 0.01  # share of the values on each side that the outermost bins take in


@dataclass(frozen=True)
class Curves:
    """Lines by label, each [(x, y), ...], and horizontal lines by label."""

    title: str
    x_label: str
    lines: dict[str, list[tuple[float, float]]]
    limits: tuple[float, float] | None = None  # of the y axis
    y_label: str = ""
    levels: dict[str, float] = field(default_factory=dict)

    def draw(self, axes, colours) -> None:
        for (label, points), colour, dash in zip(self.lines.items(), cycle(colours), cycle(DASHES), strict=False):
            axes.plot(*zip(*points, strict=True), linestyle=dash, color=colour, label=label,
                      marker="o" if len(points) < 30 else None, markersize=5)
        for (label, level), dash in zip(self.levels.items(), cycle(DASHES), strict=False):
            axes.axhline(level, linestyle=dash, linewidth=1.6, color="gray", label=label)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel(self.y_label)
        is_whole = all(x == int(x) for points in self.lines.values() for x, _ in points)  # steps are
        axes.xaxis.get_major_locator().set_params(integer=is_whole)
        if self.limits:
            axes.set_ylim(*self.limits)
        add_legend(axes)


@dataclass(frozen=True)
class Histogram:
    """Histograms of the values of each label.

    The outermost bins have all values beyond them: a few outliers must not leave two bars for all the rest.
    """

    title: str
    x_label: str
    values: dict[str, list[float]]

    def draw(self, axes, colours) -> None:
        edges = self.bin_edges()
        for (label, values), colour, dash in zip(self.values.items(), cycle(colours), cycle(DASHES), strict=False):
            axes.hist(np.clip(values, edges[0], edges[-1]), edges, histtype="step", color=colour, linestyle=dash,
                      linewidth=2.4, label=label)
        axes.set_xlabel(self.x_label)
        axes.set_ylabel("answers")
        add_legend(axes)

    def bin_edges(self) -> np.ndarray:
        """Compute the edges [HISTOGRAM_BINS + 1] of bins over the pooled values without both tails."""
        pooled = np.concatenate([np.asarray(values, float) for values in self.values.values()])
        low, high = np.quantile(pooled, (HISTOGRAM_TAIL, 1 - HISTOGRAM_TAIL))
        if low == high:
            low, high = pooled.min(), pooled.max()
        return np.linspace(low, high if high > low else low + 1, HISTOGRAM_BINS + 1)


class Drawable(Protocol):
    """A figure that draws itself on Matplotlib axes, in the page's colours."""

    title: str

    def draw(self, axes, colours) -> None: ...


class Pictures(NamedTuple):
    """The files of a figure: PNG, light and dark, and SVG for print, light, with letters as paths."""

    light: bytes
    dark: bytes
    svg: bytes


@contextmanager
def _drawn(figure: Drawable, dark: bool) -> Iterator[FigureCanvasAgg]:
    """Yield a canvas with the figure, in whose colours and fonts the block runs."""
    ground, ink, colours = DARK if dark else LIGHT
    text_colours = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink)
    with matplotlib.rc_context({**BASE, **text_colours, "axes.facecolor": ground, "figure.facecolor": ground}):
        canvas = FigureCanvasAgg(Figure(figsize=(WIDTH_INCHES, ASPECT * WIDTH_INCHES), dpi=DPI))
        axes = canvas.figure.add_subplot()
        axes.set_title(figure.title)
        figure.draw(axes, colours)
        yield canvas


def draw_pictures(figure: Drawable) -> Pictures:
    """Draw a figure; the same figure gives the same bytes. The layout, a third of the time, is computed once."""
    stream = io.BytesIO()
    with _drawn(figure, dark=False) as canvas:
        light, (axes,) = _save_png(canvas), canvas.figure.axes
        canvas.figure.set_layout_engine("none")
        FigureCanvasSVG(canvas.figure).print_svg(stream, metadata={"Date": None})
    with _drawn(figure, dark=True) as canvas:
        canvas.figure.set_layout_engine("none")
        canvas.figure.axes[0].set_position(axes.get_position())
        return Pictures(light, _save_png(canvas), stream.getvalue())


def _save_png(canvas: FigureCanvasAgg) -> bytes:
    """Draw a canvas as a PNG file."""
    canvas.draw()
    pixels, stream = Image.frombytes("RGBA", canvas.get_width_height(), canvas.buffer_rgba()), io.BytesIO()
    few_colours = pixels.convert("RGB").quantize(PALETTE, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few_colours.save(stream, "png", optimize=True)
    return stream.getvalue()


class FigureFolder:
    """Draws figures into a folder, as PNG (light and dark) and SVG, and returns them as elements of the page."""

    def __init__(self, folder: Path):
        self.folder, self.count = folder, 0
        folder.mkdir(exist_ok=True)

    def draw(self, figures: dict[str, Drawable]) -> Html:
        """Draw figures by file name, side by side as far as the screen allows."""
        return element("div", *(self._draw(name, figure) for name, figure in figures.items()), class_="figures")

    def _draw(self, name: str, figure: Drawable) -> Html:
        drawn = draw_pictures(figure)
        (self.folder / f"{name}.png").write_bytes(drawn.light)
        (self.folder / f"{name}-dark.png").write_bytes(drawn.dark)
        (self.folder / f"{name}.svg").write_bytes(drawn.svg)
        self.count += 1
        return picture(drawn.light, drawn.dark, figure.title)


def add_legend(axes) -> None:
    """Add a legend where there are several lines; that of many lines is above them."""
    count = len(axes.get_legend_handles_labels()[1])
    if count > FEW_LINES:
        low, high = axes.get_ylim()
        rows = -(-count // LEGEND_COLUMNS)
        axes.set_ylim(low, high + LEGEND_ROOM * rows * (high - low))
        axes.legend(loc="upper left", ncols=LEGEND_COLUMNS, fontsize=LEGEND_SIZE, columnspacing=1.2)
    elif count > 1:
        axes.legend()


def interval_ends(estimate: dict) -> list[float]:
    """Return the ends of an interval; the mean twice where there is none."""
    return [estimate["mean"] if estimate[end] is None else estimate[end] for end in ("low", "high")]
