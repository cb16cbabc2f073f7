"""Data section of the report: how many posts and pairs remain after each step, and why others were dropped."""

import re

from stages.render.histogram_bins import Bins, bin_integers, bin_lengths, clip_tails
from stages.render.html import Html, element, join_html, table
from stages.reporting.figures import Bars

MAX_BARS = 24
HISTOGRAMS = {  # title, value, what is counted
    "scores": ("scores of answers", "score", "answers"), "score_gaps": ("gaps of pairs", "score gap", "pairs"),
    "years": ("questions by year", "year", "questions"),
    "question_characters": ("length of questions", "characters", "questions"),
    "answer_characters": ("length of answers", "characters", "answers")}
FUNNEL_COUNTS = {"posts": ("rows_read", "rows_set_aside", "dropped", "questions", "answers"),
                 "pairs": ("posts_in", "posts_out", "dropped_posts", "pairs_drawn", "dropped_pairs", "pairs",
                           "pairs_by_split")}


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


def render_sites(posts: dict, pairs: dict) -> Html:
    """Render the counts of each site."""
    both = [metrics.get("sites", {}) for metrics in (posts, pairs)]
    columns = ((both[0], "questions"), (both[0], "answers"), (both[1], "questions"), (both[1], "pairs"))
    rows = [[element("bdi", site), *(f"{counts.get(site, {}).get(name, 0):,}" for counts, name in columns)]
            for site in dict.fromkeys([*both[0], *both[1]])]
    return table(["site", "questions", "answers", "questions with pairs", "pairs"], rows)


def render_other_counts(stage: str, metrics: dict) -> Html:
    """Render every other count of a stage, folded away; a mapping (licences) becomes several rows."""
    others = {name: value for name, value in metrics.items()
              if name not in HISTOGRAMS and name not in FUNNEL_COUNTS[stage] and name != "sites"}
    rows = [row for name, value in others.items() for row in _counts(name.replace("_", " "), value)]
    if not rows:
        return join_html([])
    return element("details", element("summary", f"{len(rows)} more counts of {stage}"), table(["what", "count"], rows))


def build_histograms(stage: str, metrics: dict) -> dict[str, Bars]:
    """Build the figures of a data stage, by file name."""
    return {f"{stage}-{name.replace('_', '-')}": _build_bars(
                f"{stage.capitalize()}: {title}", axis, unit, metrics[name])
            for name, (title, axis, unit) in HISTOGRAMS.items() if metrics.get(name)}


def _build_bars(title: str, axis: str, unit: str, counts: dict[str, int]) -> Bars:
    """Choose the bins of counts by value from the values; what is no number (an unknown year) comes last."""
    bin_values = bin_lengths if axis == "characters" else bin_integers
    numbers = {int(value): count for value, count in counts.items() if re.fullmatch(r"-?[0-9]+", value)}
    others = {value: count for value, count in counts.items() if not re.fullmatch(r"-?[0-9]+", value)}
    if not numbers:
        return Bars(title, axis, unit, others)
    bins, clipped = bin_values(numbers, MAX_BARS), bin_values(clip_tails(numbers), MAX_BARS)
    words = ", from" if _widest(bins) > 1 else ""
    if _widest(clipped) < _widest(bins):
        bins, words = clipped, f"{words} (the outermost: all beyond)"
    return Bars(title, axis + words, unit, {str(first): count for first, _, count in bins} | others)


def _widest(bins: Bins) -> int:
    return max(last - first + 1 for first, last, _ in bins)


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


def _counts(name: str, value: object) -> list[list[str]]:
    if isinstance(value, dict):
        return [[f"{name}: {key}", f"{part:,}"] for key, part in value.items() if _is_count(part)]
    return [[name, f"{value:,}"]] if _is_count(value) else []


def _is_count(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
