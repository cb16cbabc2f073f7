"""Recipe section of the report: what differs from the published values."""

from stages.render.html import Html, element, join_html, table
from stages.runtime.manifest import flatten_tree


def render_recipe(stages: dict[str, dict], published: dict[str, list[tuple]]) -> Html:
    """Compare the settings of each stage with its published values.

    What differs is one table, everything else another, folded away.

    Args:
        stages: settings by stage, as in its manifest.
        published: [(dotted name, value, meaning)] by stage.
    """
    rows: dict[bool, list[list]] = {True: [], False: []}
    counts = []
    for stage, values in stages.items():
        default = {name: (value, doc) for name, value, doc in published[stage]}
        settings = flatten_tree(values, lists=False)
        for name, value in settings.items():
            usual, doc = default.get(name, (None, "not a setting of this version"))
            rows[value == usual].append([f"{stage}.{name}", format_setting(value), format_setting(usual), doc])
        differ = sum(value != default.get(name, (None,))[0] for name, value in settings.items())
        counts.append(f"{stage}: {differ} of {len(settings)} settings differ")
    head = ["setting", "here", "published", "meaning, unit [source of the published value, or ours]"]
    others = element("details", element("summary", f"{len(rows[True])} settings as published"),
                     table(head, rows[True], class_="recipe"))
    return join_html([element("p", "; ".join(counts), ".", class_="faint"),
                      table(head, rows[False], class_="recipe") if rows[False] else "", others])


def format_setting(value: object) -> str:
    """Format a value of the recipe."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
