"""Pipeline section of the report: which artifact is made from which, with time and peak memory."""

from dataclasses import dataclass

from stages.artifacts.manifest import list_input_sources
from stages.render.html import Html, element, sortable_text, table
from stages.render.units import format_duration

LANE, GAP = 0.11, 0.05  # widths beside a box of width 1


@dataclass(frozen=True)
class Node:
    """An artifact, and the indices of those that it was made from."""

    name: str
    cost: str  # time and memory
    share: float  # of the longest time
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """Artifacts from top to bottom. One that is read further down has a lane at the right."""

    title: str
    nodes: list[Node]
    aspect = 0.95

    def draw(self, axes, colours) -> None:
        for row, node in enumerate(self.nodes):
            self._box(axes, row, node, colours[0])
            if row - 1 in node.reads:
                axes.annotate("", (0.07, row - 0.34), (0.07, row - 0.66), arrowprops=_arrow(colours[0]))
        lanes = self.lanes()
        for number, (source, readers) in enumerate(lanes.items()):
            self._lane(axes, source, readers, (number + 0.5) / len(lanes) - 0.5,
                       1 + GAP + LANE * (len(lanes) - 1 - number), colours[number % len(colours)])
        axes.set(xlim=(-0.01, 1 + GAP + LANE * len(lanes)), ylim=(len(self.nodes) - 0.6, -0.4))
        axes.set_axis_off()

    def lanes(self) -> dict[int, list[int]]:
        """List the readers of each artifact, except one in the next row; the first artifact has the outermost lane."""
        readers = {source: [row for row, node in enumerate(self.nodes) if source in node.reads and row > source + 1]
                   for source in range(len(self.nodes))}
        return {source: rows for source, rows in readers.items() if rows}

    def _box(self, axes, row: int, node: Node, colour: str) -> None:
        axes.fill_between([0, 1], row - 0.34, row + 0.34, color=colour, alpha=0.12, linewidth=0)
        axes.plot([0, node.share], [row + 0.34] * 2, color=colour, linewidth=4, solid_capstyle="butt")
        axes.text(0.03, row, node.name, va="center", weight="bold")
        axes.text(0.98, row, node.cost, va="center", ha="right", fontsize=13)

    def _lane(self, axes, source: int, readers: list[int], height: float, x: float, colour: str) -> None:
        """Draw from the right side of the source down to that of each reader; `height` keeps lanes apart at a box."""
        offset = 0.56 * height
        axes.plot([1, x, x], [source + offset, source + offset, readers[-1] + offset], color=colour, linewidth=1.8)
        for reader in readers:
            axes.annotate("", (1, reader + offset), (x, reader + offset), arrowprops=_arrow(colour))


def sort_by_ancestry(manifests: dict[str, dict], digests: dict[str, str]) -> dict[str, dict]:
    """Sort manifests so that each comes after all that it was made from."""
    left, ordered = dict(manifests), {}
    while left:
        waiting = {digests[name] for name in left}
        name = next(name for name, manifest in left.items() if not waiting & _source_digests(manifest))
        ordered[name] = left.pop(name)
    return ordered


def build_graph(manifests: dict[str, dict], digests: dict[str, str]) -> Graph:
    """Build the graph: an edge where an artifact's inputs name another's digest."""
    longest = max(manifest["seconds"] for manifest in manifests.values()) or 1
    nodes = [Node(name, f"{format_duration(manifest['seconds'])}, {manifest['peak_memory_mib']:,} MiB",
                  manifest["seconds"] / longest,
                  tuple(row for row, other in enumerate(manifests) if digests[other] in _source_digests(manifest)))
             for name, manifest in manifests.items()]
    return Graph("What is made from what, with time and peak memory", nodes)


def render_times(manifests: dict[str, dict]) -> Html:
    """Render the time and the peak memory of each artifact."""
    total = sum(manifest["seconds"] for manifest in manifests.values()) or 1
    rows = [[name, sortable_text(format_duration(manifest["seconds"]), manifest["seconds"]),
             f"{100 * manifest['seconds'] / total:.1f} %",
             sortable_text(f"{manifest['peak_memory_mib']:,} MiB", manifest["peak_memory_mib"])]
            for name, manifest in manifests.items()]
    machines = sorted(set(map(_describe_machine, manifests.values())))
    words = f"{format_duration(total)} in all. The bar below a stage is its time. Run on {'; '.join(machines)}."
    return element("div", table(["stage", "time", "share", "peak memory"], rows),
                   element("p", words, class_="faint"))


def render_pipeline(graph: Html, manifests: dict[str, dict]) -> Html:
    """Render the drawn graph beside the table of times."""
    return element("div", graph, render_times(manifests), class_="beside")


def _describe_machine(manifest: dict) -> str:
    counts = {name: manifest.get(name, 1) for name in ("processes", "nodes")}
    several = "".join(f", {name}: {count}" for name, count in counts.items() if count > 1)
    return f"{manifest['device']}{several}, threads: {manifest['threads']}"


def _source_digests(manifest: dict) -> set[str]:
    return {source["sha256"] for source in list_input_sources(manifest["inputs"]).values()}


def _arrow(colour: str) -> dict:
    return {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.8}
