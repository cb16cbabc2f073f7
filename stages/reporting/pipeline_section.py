"""Pipeline section of the report: the time and the peak memory of each artifact, in the order of their making."""

from dataclasses import dataclass

from stages.artifacts.manifest import list_input_sources
from stages.render.html import Html, element, sortable_text, table
from stages.render.units import format_duration
from stages.reporting.figures import LEGEND_SIZE, FigureFolder


@dataclass(frozen=True)
class Costs:
    """Time of each artifact as a bar, with words beside it: {name: (seconds, words)}."""

    title: str
    rows: dict[str, tuple[float, str]]

    def draw(self, axes, colours) -> None:
        """Draw the bars on Matplotlib axes, the first at the top."""
        seconds = [number for number, _ in self.rows.values()]
        axes.barh(list(self.rows), seconds, color=colours[0], alpha=0.5)
        for row, (number, words) in enumerate(self.rows.values()):
            axes.text(number, row, f" {words}", va="center", fontsize=LEGEND_SIZE)
        axes.set_xlim(0, 1.6 * max(seconds) or 1)  # room for the words
        axes.invert_yaxis()
        axes.set_xlabel("seconds")


def sort_by_ancestry(manifests: dict[str, dict], digests: dict[str, str]) -> dict[str, dict]:
    """Sort manifests so that each comes after all that it was made from."""
    left, ordered = dict(manifests), {}
    while left:
        waiting = {digests[name] for name in left}
        name = next(name for name, manifest in left.items() if not waiting & _source_digests(manifest))
        ordered[name] = left.pop(name)
    return ordered


def render_pipeline(figures: FigureFolder, manifests: dict[str, dict]) -> Html:
    """Render the time and the peak memory of each artifact, as a figure beside a table."""
    costs = {name: (manifest["seconds"], f"{format_duration(manifest['seconds'])}, {manifest['peak_memory_mib']:,} MiB")
             for name, manifest in manifests.items()}
    figure = figures.draw({"pipeline": Costs("Time and peak memory of each stage", costs)})
    total = sum(manifest["seconds"] for manifest in manifests.values()) or 1
    rows = [[name, sortable_text(format_duration(manifest["seconds"]), manifest["seconds"]),
             f"{100 * manifest['seconds'] / total:.1f} %",
             sortable_text(f"{manifest['peak_memory_mib']:,} MiB", manifest["peak_memory_mib"])]
            for name, manifest in manifests.items()]
    machines = sorted(set(map(_describe_machine, manifests.values())))
    words = f"{format_duration(total)} in all. Run on {'; '.join(machines)}."
    return element("div", figure, element("div", table(["stage", "time", "share", "peak memory"], rows),
                                          element("p", words, class_="faint")), class_="beside")


def _describe_machine(manifest: dict) -> str:
    counts = {name: manifest.get(name, 1) for name in ("processes", "nodes")}
    several = "".join(f", {name}: {count}" for name, count in counts.items() if count > 1)
    return f"{manifest['device']}{several}, threads: {manifest['threads']}"


def _source_digests(manifest: dict) -> set[str]:
    return {source["sha256"] for source in list_input_sources(manifest["inputs"]).values()}
