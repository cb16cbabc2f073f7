"""One self-contained page: one script of its own, no request, and a policy that forbids any other."""

import base64
import hashlib
from pathlib import Path

from stages.render.html import Html, element, join_html

STYLE = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
SCRIPT = Path(__file__).with_name("page.js").read_text(encoding="utf-8")
DIGEST = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
POLICY = (f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{DIGEST}'; "
          f"base-uri 'none'; form-action 'none'")


def page(title: str, lead: Html, sections: dict[str, Html]) -> Html:
    """A whole document: title, what stands first, and sections by heading with links to them."""
    named = [(f"s{number}", heading, body) for number, (heading, body) in enumerate(sections.items(), 1)]
    head = element(
        "head", element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="referrer", content="no-referrer"),
        element("title", title), element("style", Html(STYLE)))
    links = element("nav", *(element("a", heading, href=f"#{anchor}") for anchor, heading, _ in named))
    bodies = [element("section", element("h2", heading), body, id=anchor) for anchor, heading, body in named]
    body = element("body", element("h1", title), lead, links, *bodies, element("script", Html(SCRIPT)))
    return join_html([Html("<!doctype html>\n"), element("html", head, body, lang="en"), "\n"])
