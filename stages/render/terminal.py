"""Facts as plain text for a terminal: numbers, rows, and foreign text that can do nothing to the terminal."""

import json
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH, COLUMN = 100, 42  # characters of a page, and at most of a column that is not the last
TEXT_CHARACTERS, LIST_ITEMS = 300, 3  # of a value that is told in brief


def escape_controls(text: str) -> str:
    """Control characters, direction marks and lone surrogates as escapes (`\\x1b`, `\\n`, `\\u202e`): one line."""
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)


def shorten(text: str, characters: int) -> str:
    """At most so many characters; one that is left over for the sign that something is missing."""
    return text if len(text) <= characters else text[: max(0, characters - 1)] + "…"


def format_value(value: Any, characters: int = WIDTH) -> str:
    """A value in one line, at most so many characters long."""
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    elif isinstance(value, int):
        value = f"{value:,}"
    elif isinstance(value, float):
        value = f"{value:.6g}"
    return shorten(escape_controls(shorten(str(value), characters + 1)), characters)


def format_bytes(count: float) -> str:
    """Bytes for people, in decimal units."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            break
        count, unit = count / 1000, "TB"
    return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.3g} {unit}"


def truncate_value(value: Any) -> Any:
    """A value of any depth with its texts, and its lists, cut short."""
    if isinstance(value, str):
        return shorten(value, TEXT_CHARACTERS)
    if isinstance(value, dict):
        return {key: truncate_value(part) for key, part in value.items()}
    return [truncate_value(part) for part in value[:LIST_ITEMS]] if isinstance(value, list) else value


def format_columns(lines: Iterable[Sequence[Any]], indent: int = 2) -> list[str]:
    """Values in columns as wide as they need, two apart; the last one gets what is left of WIDTH."""
    cells = [[*(format_value(value, COLUMN) for value in line[:-1]), format_value(line[-1])] for line in lines]
    widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in cells), strict=True)]
    left = WIDTH - indent - sum(widths) - 2 * len(widths)
    return [" " * indent + "  ".join([*(cell.ljust(width) for cell, width in zip(line, widths, strict=False)),
                                      shorten(line[-1], max(left, 20))]).rstrip() for line in cells]


def format_named_texts(values: dict[str, Any], indent: int = 2) -> list[str]:
    """Each value beside its name, in full lines; the line ends of a text are escaped."""
    wide = max((len(name) for name in values), default=0)
    return [line for name, value in values.items()
            for line in wrap_paragraph(" " * indent + f"{escape_controls(name):<{wide}}  ", value)]


def wrap_paragraph(first: str, value: Any) -> list[str]:
    """A value as full lines behind the words it begins with."""
    return textwrap.wrap(format_value(value, TEXT_CHARACTERS), WIDTH, initial_indent=first,
                         subsequent_indent=" " * len(first)) or [first]
