"""HTML that escapes by construction: whatever is not an element is text, and text is escaped."""

import base64
import html
import struct
from collections.abc import Iterable
from urllib.parse import urlsplit

VOID = ("meta", "img", "source", "br")
# Control characters, which HTML may not hold, become their visible signs; tab and line feed stay.
VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}


class Html(str):
    """Markup made here; any other string is text of someone else's."""


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """<name attributes>children</name>. A trailing underscore of an attribute's name is dropped (class_), True stands
    for a bare attribute, None for none at all."""
    given = "".join(f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{_escaped(value)}"')
                    for key, value in attributes.items() if value is not None)
    if name in VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join_html(children)}</{name}>")


def join_html(children: Iterable[object]) -> Html:
    """Elements as they are, everything else escaped."""
    return Html("".join(child if isinstance(child, Html) else _escaped(child) for child in children))


def link(text: str, address: str | None) -> Html:
    """A link, if the address is an http(s) one; else the text alone."""
    try:
        parts = urlsplit(address or "")
    except ValueError:
        return join_html([text])
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return join_html([text])
    return element("a", text, href=address, rel="noopener noreferrer nofollow")


def pre_text(text: str) -> Html:
    """A post or an answer exactly as written; its own direction of writing stays inside."""
    return element("pre", text, dir="auto")


def sortable_text(text: str, value: float) -> Html:
    """Words for a number, which a column of them is sorted by."""
    return element("data", text, value=f"{value:g}")


def table(head: Iterable[object], rows: Iterable[Iterable[object]], numeric: bool = True, class_: str | None = None
          ) -> Html:
    """A table that scrolls sideways by itself on a narrow screen; all columns but the first hold numbers, or none.

    page.js sorts it by a column: as numbers if every cell begins with one, or any is `valued`; else as text.
    """
    body = [element("tr", element("th", first, scope="row"), *(element("td", cell) for cell in cells))
            for first, *cells in rows]
    top = element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
    return element("div", element("table", top, element("tbody", *body),
                                  class_=class_ or ("numbers" if numeric else None)), class_="scroll", tabindex="0")


def picture(light: bytes, dark: bytes, caption: str) -> Html:
    """Two PNGs as one figure, embedded: the dark one on a dark screen, never on paper."""
    width, height = struct.unpack(">II", light[16:24])
    return element("figure", element(
        "picture", element("source", srcset=_data(dark), media="screen and (prefers-color-scheme: dark)"),
        element("img", src=_data(light), alt=caption, width=width, height=height, decoding="async")))


def _escaped(text: object) -> str:
    return html.escape(str(text).replace("\r\n", "\n").translate(VISIBLE))


def _data(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()
