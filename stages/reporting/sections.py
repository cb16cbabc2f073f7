"""Sections of the report: data, the reward model, pipeline, recipe and provenance."""

from dataclasses import dataclass

from stages.artifacts.manifest import flatten_tree, list_input_sources
from stages.render.html import Html, element, join_html, sortable_text, table
from stages.render.terminal import format_setting
from stages.render.units import format_duration
from stages.reporting.figures import LEGEND_SIZE, Curves, FigureFolder


def render_funnel(posts: dict, pairs: dict) -> Html:
    """Render the funnel from rows of the dump to pairs, from the metrics of both stages."""
    remaining = posts.get("questions", 0) + posts.get("answers", 0)
    rows = [*_step("rows of the dump", posts.get("rows_read"), {}),
            *_step("posts kept: questions and answers", remaining,
                   {"could not be read": posts.get("rows_set_aside", 0), **posts.get("dropped", {})},
                   posts.get("rows_read")),
            *_step("posts in pairs", pairs.get("posts_out"), pairs.get("dropped_posts", {}), pairs.get("posts_in")),
            *_step("pairs drawn", pairs.get("pairs_drawn"), {}),
            *_step("pairs", pairs.get("pairs"), pairs.get("dropped_pairs", {}), pairs.get("pairs_drawn")),
            *(_row(f"for {split}", count, pairs.get("pairs"), "part")
              for split, count in pairs.get("pairs_by_split", {}).items())]
    return table(["from posts to pairs", "count", "share of the step before"], rows)


def _step(label: str, remaining: int | None, dropped: dict[str, int], before: int | None = None) -> list[list]:
    """List what a step dropped by reason, what the counts do not account for, and what remains."""
    if remaining is None:
        return []
    missing = 0 if before is None else before - remaining - sum(dropped.values())
    dropped = {**dropped, **({"not accounted for": missing} if missing else {})}
    return [*(_row(f"dropped: {reason}", count, before, "lost") for reason, count in dropped.items() if count),
            _row(label, remaining, before, "kept")]


def _row(words: str, count: int, before: int | None, kind: str) -> list:
    if not before:
        return [element("span", words, class_=kind), f"{count:,}", "–"]
    share = 100 * count / before
    bar = element("span", element("span", class_=f"bar {kind}", style=f"width:{share:.1f}%"), class_="track")
    return [element("span", words, class_=kind), f"{count:,}", join_html([f"{share:.1f} %", bar])]


def list_sources(manifests: dict[str, dict]) -> list[str]:
    """List what the evaluation's questions are of: the sites of a dump, or the file of a user's own prompts."""
    if "posts" in manifests:
        return list(manifests["posts"]["metrics"].get("sites", {}))
    return [_short(manifests["evaluate"]["inputs"]["file"]["path"])]


def render_reward_model(figures: FigureFolder, reward: dict) -> Html:
    """Render the accuracy of a reward model beside its baselines, its calibration, and the accuracy by kind of pair."""
    bins, figure = reward["calibration"]["bins"], "evaluate-calibration"
    calibration = Curves(
        f"Calibration (expected error {reward['calibration']['expected_error']:.3f})",
        "confidence: sigmoid of the difference in reward",
        {"reward model": [(each["confidence"], each["accuracy"]) for each in bins],
         "perfectly calibrated": [(0.5, 0.5), (1.0, 1.0)]}, y_label="share right")
    words = (f"{reward['pairs']:,} pairs of {reward['questions']:,} held-out questions; "
             f"{reward['dropped_over_length']:,} pairs were dropped as too long. Ties count one half.")
    return join_html([element("p", words, class_="faint"), render_accuracy(reward),
                      figures.draw({figure: calibration} if bins else {}), element("h3", "Where it is right"),
                      render_breakdown(reward)])


def render_accuracy(reward: dict) -> Html:
    """Render the share of held-out pairs ranked right by the reward model and by its baselines."""
    shares = {"reward model": reward["accuracy"],
              **{f"baseline: {name}": estimate for name, estimate in reward["baselines"].items()},
              "an oracle that knows the truth (ceiling)": reward["oracle"],
              "reward model, both answers have code": reward["both_have_code"],
              "the oracle, both answers have code": reward["oracle_both_have_code"],
              "reward model, better answer written later": reward["better_is_later"]}
    rows = [[label, *estimate_cells(estimate)] for label, estimate in shares.items() if estimate]
    if reward["best_cheap_baseline"]:
        rows.append([f"reward model minus “{reward['best_cheap_baseline']}”",
                     *estimate_cells(reward["above_best_cheap_baseline"], signed=True)])
    rows.append(["calibration: expected error", f"{reward['calibration']['expected_error']:.3f}", "–",
                 f"{reward['pairs']:,}"])
    return table(["pairs ranked right", "share", "95 % interval", "pairs"], rows)


def render_breakdown(reward: dict) -> Html:
    """Render the share ranked right by length, score gap, site and tag."""
    kinds = {"better answer is": "by_length", "score gap": "by_score_gap", "site": "by_site",
             "tag": "by_tag"}
    rows = [[join_html([f"{kind}: ", element("bdi", name)]), *estimate_cells(estimate)]
            for kind, key in kinds.items() for name, estimate in reward[key].items()]
    return table(["kind of pairs", "share ranked right", "95 % interval", "pairs"], rows)


def render_provenance(manifests: dict[str, dict], digests: dict[str, str]) -> Html:
    """Render the digest, code version and inputs of each artifact, and the inputs from outside the run."""
    sources = {stage: list_input_sources(manifest["inputs"]).values() for stage, manifest in manifests.items()}
    rows = [[stage, element("code", digests[stage]), element("code", manifest["commit"] or "unknown"),
             ", ".join(sorted(_short(source["path"]) for source in sources[stage]))]
            for stage, manifest in manifests.items()]
    outside = {source["path"]: source["sha256"] for stage in manifests for source in sources[stage]
               if source["sha256"] not in digests.values()}
    rows_outside = [[path, element("code", sha256 or "from a hub: see the revision in the recipe")]
                    for path, sha256 in outside.items()]
    return join_html([
        table(["artifact", "sha256 of its manifest", "commit", "made from"], rows, class_="digests"),
        table(["inputs from outside the run", "sha256"], rows_outside, class_="digests") if rows_outside else "",
        element("p", _versions(manifests), class_="faint")])


def render_recipe(stages: dict[str, dict], published: dict[str, list[tuple]]) -> Html:
    """Render the settings of each stage that differ from their published values, and count them.

    Args:
        stages: settings by stage, as in its manifest.
        published: [(dotted name, value, meaning)] by stage.
    """
    rows, counts = [], []
    for stage, values in stages.items():
        default = {name: (value, doc) for name, value, doc in published[stage]}
        settings = flatten_tree(values, lists=False)
        differing = {name: value for name, value in settings.items() if value != default.get(name, (None,))[0]}
        for name, value in differing.items():
            usual, doc = default.get(name, (None, "not a setting of this version"))
            rows.append([f"{stage}.{name}", format_setting(value), format_setting(usual), doc])
        counts.append(f"{stage}: {len(differing)} of {len(settings)} settings differ")
    words = (f"What differs from the published values or, where none was published, from our defaults. "
             f"{'; '.join(counts)}.")
    head = ["setting", "here", "published", "meaning, unit [source of the published value, or ours]"]
    return join_html([element("p", words, class_="faint"), table(head, rows, class_="recipe") if rows else ""])


def _versions(manifests: dict[str, dict]) -> str:
    versions = sorted({(name, version) for manifest in manifests.values()
                       for name, version in manifest["versions"].items()})
    python = ", ".join(sorted({manifest["python"] for manifest in manifests.values()}))
    return f"Python {python}; " + ", ".join(f"{name} {version}" for name, version in versions)


def _short(path: str) -> str:
    return path.removesuffix("/manifest.json").rstrip("/").rsplit("/", 1)[-1]


def estimate_cells(estimate: dict | None, signed: bool = False) -> list[str]:
    """Render the cells mean, interval and count of an estimate."""
    if estimate is None:
        return ["–", "–", "0"]
    form = "+z.3f" if signed else "z.3f"
    interval = "–" if estimate["low"] is None else f"{estimate['low']:{form}} to {estimate['high']:{form}}"
    return [f"{estimate['mean']:{form}}", interval, f"{estimate['count']:,}"]


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
