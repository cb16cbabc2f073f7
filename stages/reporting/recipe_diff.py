"""The recipe of a run as what differs from the published one."""

from stages.render.html import Html, element, join_html, table
from stages.runtime.manifest import leaves


def recipe(stages: dict[str, dict], published: dict[str, list[tuple]]) -> Html:
    """Settings by stage (a manifest's config) against the defaults [(dotted name, value, meaning)] of its section.

    What differs is one table, everything else another, folded away.
    """
    rows: dict[bool, list[list]] = {True: [], False: []}
    counts = []
    for stage, values in stages.items():
        default = {name: (value, doc) for name, value, doc in published[stage]}
        present = leaves(values)
        for name, value in present.items():
            usual, doc = default.get(name, (None, "of an older version: there is no such setting any more"))
            rows[value == usual].append([f"{stage}.{name}", _plain(value), _plain(usual), doc])
        differ = sum(value != default.get(name, (None,))[0] for name, value in present.items())
        counts.append(f"{stage}: {differ} of {len(present)} settings differ")
    head = ["setting", "here", "published", "meaning, unit [source of the published value, or ours]"]
    others = element("details", element("summary", f"{len(rows[True])} settings as published"),
                     table(head, rows[True], class_="recipe"))
    return join_html([element("p", "; ".join(counts), ".", class_="faint"),
                   table(head, rows[False], class_="recipe") if rows[False] else "", others])


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
