"""Format facts as plain text for a terminal; foreign text in them cannot control the terminal."""

import json
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

WIDTH, COLUMN = 100, 42  # characters of a page, but for a terminal's, and at most of a column other than the last
TEXT_CHARACTERS, LIST_ITEMS = 300, 3  # kept by truncate_value


def escape_controls(text: str) -> str:
    """Replace control characters, direction marks and lone surrogates by escapes (`\\x1b`, `\\n`, `\\u202e`)."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def page_width() -> int:
    """Return the characters of a line: those of the terminal, WIDTH for a file or a pipe."""
    return shutil.get_terminal_size((WIDTH, 1)).columns


def shorten(text: str, characters: int) -> str:
    """Cut a text to a number of characters, an ellipsis included."""
    return text if len(text) <= characters else text[: max(0, characters - 1)] + "…"


def format_value(value: Any, characters: int = WIDTH) -> str:
    """Format a value as one line of at most `characters`."""
    if isinstance(value, bool) or value is None or isinstance(value, list | dict):
        value = json.dumps(value, ensure_ascii=False, default=str)
    elif isinstance(value, int):
        value = f"{value:,}"
    elif isinstance(value, float):
        value = f"{value:.6g}"
    return shorten(escape_controls(shorten(str(value), characters + 1)), characters)


def format_setting(value: Any) -> str:
    """Format a value of the recipe."""
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "(none)"
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def truncate_value(value: Any) -> Any:
    """Shorten the texts and lists in a nested value."""
    if isinstance(value, str):
        return shorten(value, TEXT_CHARACTERS)
    if isinstance(value, dict):
        return {key: truncate_value(child) for key, child in value.items()}
    return [truncate_value(child) for child in value[:LIST_ITEMS]] if isinstance(value, list) else value


def format_columns(rows: Iterable[Sequence[Any]], indent: int = 2) -> list[str]:
    """Align rows in columns as wide as they need; the last column gets the rest of the page's width."""
    page = page_width()
    cells = [[*(format_value(value, COLUMN) for value in row[:-1]), format_value(row[-1], page)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row[:-1] for row in cells), strict=True)]
    left = page - indent - sum(widths) - 2 * len(widths)
    return [" " * indent + "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)),
                                      shorten(row[-1], max(left, 20))]).rstrip() for row in cells]


def format_named_texts(values: dict[str, Any]) -> list[str]:
    """Format each value as a paragraph beside its name."""
    width = max((len(name) for name in values), default=0)
    return [line for name, value in values.items()
            for line in wrap_paragraph(f"  {escape_controls(name):<{width}}  ", value)]


def wrap_paragraph(prefix: str, value: Any) -> list[str]:
    """Wrap a value into lines of the page's width after a prefix, with a hanging indent."""
    return textwrap.wrap(format_value(value, TEXT_CHARACTERS), max(page_width(), 2 * len(prefix)),
                         initial_indent=prefix, subsequent_indent=" " * len(prefix)) or [prefix.rstrip()]
