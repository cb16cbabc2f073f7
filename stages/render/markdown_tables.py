"""Format counts as Markdown tables: histograms with text bars, funnels that add up. Names are escaped."""

import re
from collections import Counter

from stages.render.histogram_bins import bin_lengths

BAR_CELLS = 20
MAX_ROWS = 40
MAX_NAME_CHARACTERS = 80
MAX_BINS = 24  # of lengths
# What could start Markdown, HTML, a link or the next cell; an underscore only at the edge of a word.
NOT_PLAIN = re.compile(r"[^\w .,…()/-]|(?<![^\W_])_|_(?![^\W_])")
Row = tuple[str | int, ...]


def clean_name(name: object, max_characters: int = MAX_NAME_CHARACTERS) -> str:
    """Return a name as one short line without control characters, direction marks included."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(name)).split())
    return line if len(line) <= max_characters else line[:max_characters - 1] + "…"


def escape_cell(name: object, max_characters: int = MAX_NAME_CHARACTERS) -> str:
    """Escape a name for a Markdown cell, by character references, which open no tag, link, span or cell."""
    return NOT_PLAIN.sub(lambda match: f"&#{ord(match[0])};", clean_name(name, max_characters)) or "(none)"


def format_table(heads: list[str], rows: list[Row]) -> str:
    """Format a Markdown table of escaped cells; number columns are aligned to the right. "" if there are no rows."""
    if not rows:
        return ""
    lines = [heads, ["---:" if isinstance(value, int) else "---" for value in rows[0]]]
    lines += [[f"{value:,}" if isinstance(value, int) else value for value in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def top_rows(rows: list[Row], limit: int = 50, rest: str = "more") -> list[Row]:
    """Sort rows of a name and counts by falling count; sum up the rows after the first `limit`."""
    rows = sorted(rows, key=lambda row: ([-count for count in row[1:]], row[0]))
    if len(rows) <= limit:
        return rows
    return rows[:limit] + [(f"{len(rows) - limit:,} {rest}", *_sums(rows[limit:]))]


def add_sum_row(rows: list[Row]) -> list[Row]:
    """Append the sum of each column to rows of a name and counts; [] stays empty."""
    return [*rows, ("**sum**", *_sums(rows))] if rows else []


def _sums(rows: list[Row]) -> list[int]:
    return [sum(column) for column in list(zip(*rows, strict=True))[1:]]


def add_funnel_sum(parts: list[Row], total: int | None = None) -> list[Row]:
    """Append the sum to the parts and, if a separately counted `total` differs, a row for the difference."""
    [parts_sum] = _sums(parts) if parts else [0]
    missing = 0 if total is None else total - parts_sum
    return add_sum_row(parts + [("*not accounted for*", missing)] if missing else parts)


def format_histogram(counts: dict, heads: list[str], binned: bool = False) -> str:
    """Format {value: count} by rising value, with shares, bars and the sum. "" without counts.

    Args:
        counts: the values may be text, from JSON.
        heads: titles of the value and count columns.
        binned: values are lengths, counted by histogram_bins.bin_start.
    """
    rows = _rows(counts, binned)
    total, highest = sum(count for _, count in rows), max((count for _, count in rows), default=0)
    if not total:
        return ""
    body = [(name, count, _share(count, total), _bar(count, highest)) for name, count in rows]
    return format_table([*heads, "share", ""], [*body, ("**sum**", total, "100 %", "")])


def _rows(counts: dict, binned: bool) -> list[tuple[str, int]]:
    numbers, names = Counter(), Counter()
    for key, count in counts.items():
        try:
            numbers[int(key)] += count
        except (TypeError, ValueError):  # such as the year of a post without a date
            names[escape_cell(key)] += count
    rows = [(_bin_range(first, last), count) for first, last, count in bin_lengths(numbers, MAX_BINS)
            ] if binned and numbers else [(str(value), numbers[value]) for value in _fill_gaps(numbers)]
    rows += sorted(names.items())
    if len(rows) <= MAX_ROWS:
        return rows
    rest = rows[MAX_ROWS - 1:]
    return rows[:MAX_ROWS - 1] + [(f"{len(rest):,} more", sum(count for _, count in rest))]


def _fill_gaps(numbers: Counter) -> list[int]:
    """Return the values from lowest to highest, those without counts included."""
    if not numbers:
        return []
    low, high = min(numbers), max(numbers)
    return list(range(low, high + 1)) if high - low < MAX_ROWS else sorted(numbers)


def _bin_range(first: int, last: int) -> str:
    return f"{first:,}" if first == last else f"{first:,}–{last:,}"


def _share(count: int, total: int) -> str:
    share = 100 * count / total
    return "under 0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def _bar(count: int, highest: int) -> str:
    return "█" * round(BAR_CELLS * count / highest) or "▏" * (count > 0)
