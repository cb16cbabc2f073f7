"""The stages of a run: which is made from which, with the time and the memory of each."""

from dataclasses import dataclass

from stages.render.durations import format_duration
from stages.render.html import Html, element, join_html, sortable_text, table
from stages.runtime.manifest import list_input_sources

LANE, GAP = 0.11, 0.05  # widths beside a box of width 1


@dataclass(frozen=True)
class Node:
    """One stage, and the numbers of those before it that it reads."""

    name: str
    words: str
    share: float  # of the longest one's time
    reads: tuple[int, ...]


@dataclass(frozen=True)
class Graph:
    """Stages from top to bottom. A stage that is read further down hands on along a lane of its own at the right."""

    title: str
    nodes: list[Node]
    aspect = 0.95

    def draw(self, axes, colours) -> None:
        for place, node in enumerate(self.nodes):
            self._box(axes, place, node, colours[0])
            if place - 1 in node.reads:
                axes.annotate("", (0.07, place - 0.34), (0.07, place - 0.66), arrowprops=_arrow(colours[0]))
        lanes = self.lanes()
        for number, (source, readers) in enumerate(lanes.items()):
            self._lane(axes, source, readers, (number + 0.5) / len(lanes) - 0.5,
                       1 + GAP + LANE * (len(lanes) - 1 - number), colours[number % len(colours)])
        axes.set(xlim=(-0.01, 1 + GAP + LANE * len(lanes)), ylim=(len(self.nodes) - 0.6, -0.4))
        axes.set_axis_off()

    def lanes(self) -> dict[int, list[int]]:
        """Who reads each stage, but for a reader that comes right after it; the earliest stage first, outermost."""
        readers = {source: [place for place, node in enumerate(self.nodes) if source in node.reads]
                   for source in range(len(self.nodes))}
        later = {source: [place for place in places if place > source + 1] for source, places in readers.items()}
        return {source: places for source, places in later.items() if places}

    def _box(self, axes, place: int, node: Node, colour: str) -> None:
        axes.fill_between([0, 1], place - 0.34, place + 0.34, color=colour, alpha=0.12, linewidth=0)
        axes.plot([0, node.share], [place + 0.34] * 2, color=colour, linewidth=4, solid_capstyle="butt")
        axes.text(0.03, place, node.name, va="center", weight="bold")
        axes.text(0.98, place, node.words, va="center", ha="right", fontsize=13)

    def _lane(self, axes, source: int, readers: list[int], height: float, x: float, colour: str) -> None:
        """From the source's right side down to each reader's; every lane meets a box at a height of its own."""
        at = 0.56 * height
        axes.plot([1, x, x], [source + at, source + at, readers[-1] + at], color=colour, linewidth=1.8)
        for reader in readers:
            axes.annotate("", (1, reader + at), (x, reader + at), arrowprops=_arrow(colour))


def in_order(manifests: dict[str, dict], digests: dict[str, str]) -> dict[str, dict]:
    """Manifests by name, each behind all that it was made from."""
    left, found = dict(manifests), {}
    while left:
        open_ = {digests[name] for name in left}
        ready = (name for name, made in left.items() if not open_ & {source["sha256"] for source in sources(made)})
        name = next(ready)
        found[name] = left.pop(name)
    return found


def graph(manifests: dict[str, dict], digests: dict[str, str]) -> Graph:
    """The stages in the order they were made, joined where one's inputs hold another's digest."""
    names = list(manifests)
    longest = max(made["seconds"] for made in manifests.values()) or 1
    nodes = [Node(name, f"{format_duration(made['seconds'])}, {made['peak_memory_mib']:,} MiB", made["seconds"] / longest,
                  tuple(place for place, other in enumerate(names)
                        if digests[other] in {source["sha256"] for source in sources(made)}))
             for name, made in manifests.items()]
    return Graph("What is made from what, with time and peak memory", nodes)


def sources(manifest: dict) -> list[dict]:
    """Return the inputs of one artifact (path, sha256), lists and mappings unfolded."""
    return list(list_input_sources(manifest["inputs"]).values())


def times(manifests: dict[str, dict]) -> Html:
    """Each stage with its time and memory."""
    every = sum(made["seconds"] for made in manifests.values()) or 1
    rows = [[name, sortable_text(format_duration(made["seconds"]), made["seconds"]), f"{100 * made['seconds'] / every:.1f} %",
             sortable_text(f"{made['peak_memory_mib']:,} MiB", made["peak_memory_mib"])] for name, made in manifests.items()]
    machines = sorted({f"{made['device']}, threads: {made['threads']}" for made in manifests.values()})
    words = f"Together {format_duration(every)}. A bar below a stage is its time. Made on {'; '.join(machines)}."
    return element("div", table(["stage", "time", "share of it", "peak memory"], rows),
                   element("p", words, class_="faint"))


def pipeline(drawn: Html, manifests: dict[str, dict]) -> Html:
    """The graph beside the table of times."""
    return join_html([element("div", drawn, times(manifests), class_="beside")])


def _arrow(colour: str) -> dict:
    return {"arrowstyle": "-|>", "color": colour, "shrinkA": 0, "shrinkB": 0, "linewidth": 1.8}
