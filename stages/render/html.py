"""Build HTML that is escaped by construction: whatever is not an element is text, and text is escaped."""

import base64
import html
import struct
from collections.abc import Iterable
from urllib.parse import urlsplit

VOID = ("meta", "img", "source", "br", "hr")
# Control characters are not allowed in HTML: show their symbols; tab and line feed stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


class Html(str):
    """Markup built here; any other string is foreign text."""

    def __html__(self) -> str:
        """Tell a template that this needs no escaping."""
        return self


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """Build <name attributes>children</name>.

    A trailing underscore of an attribute's name is dropped (class_); True gives a bare attribute, None gives none.
    """
    markup = "".join(f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escape(value)}"')
                    for key, value in attributes.items() if value is not None)
    if name in VOID:
        return Html(f"<{name}{markup}>")
    return Html(f"<{name}{markup}>{join_html(children)}</{name}>")


def join_html(children: Iterable[object]) -> Html:
    """Join children: elements as they are, everything else escaped."""
    return Html("".join(child if isinstance(child, Html) else _escape(child) for child in children))


def link(text: str, address: str | None, **attributes: object) -> Html:
    """Build a link, with further attributes, if the address is http(s); otherwise return the text alone."""
    try:
        parts = urlsplit(address or "")
    except ValueError:
        return join_html([text])
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return join_html([text])
    return element("a", text, href=address, rel="noopener noreferrer nofollow", **attributes)


def pre_text(text: str) -> Html:
    """Show a post or an answer exactly as written, with its own direction of writing."""
    return element("pre", text, dir="auto")


def sortable_text(text: str, value: float) -> Html:
    """Show `text` for a number that a column is sorted by."""
    return element("data", text, value=f"{value:g}")


def fold(summary: object, *children: object, open_: bool = False) -> Html:
    """Build a part of the page that opens on a click, without a script."""
    return element("details", element("summary", summary), *children, open=open_ or None)


def stack_interval(text: str) -> Html:
    """Put the interval of 'mean [low, high]' under the mean: columns must be narrow."""
    mean, bracket, interval = text.partition(" [")
    return join_html([mean, " ", element("small", f"[{interval}")]) if bracket else join_html([mean])


def table(head: Iterable[object], rows: Iterable[Iterable[object]], numeric: bool = True, class_: str | None = None
          ) -> Html:
    """Build a table that scrolls sideways on a narrow screen.

    page.js sorts it by a column: as numbers if every cell begins with one, or any is a `sortable_text`; else as text.

    Args:
        numeric: all columns but the first hold numbers.
    """
    body = [element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells))
            for first, *cells in rows]
    header = element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
    return element("div", element("table", header, element("tbody", *body),
                                  class_=class_ or ("numbers" if numeric else None)), class_="scroll", tabindex="0")


def picture(light: bytes, dark: bytes, caption: str) -> Html:
    """Embed two PNGs as one figure: the dark one is shown on a dark screen, never on paper."""
    width, height = struct.unpack(">II", light[16:24])
    return element("figure", element(
        "picture", element("source", srcset=_data_url(dark), media="screen and (prefers-color-scheme: dark)"),
        element("img", src=_data_url(light), alt=caption, width=width, height=height, decoding="async")))


def _escape(text: object) -> str:
    return html.escape(str(text).replace("\r\n", "\n").translate(VISIBLE))


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
