"""Render the report as one self-contained page: its own script only, no requests, and a policy that forbids any."""

import base64
import hashlib
from collections.abc import Container
from pathlib import Path

import jinja2

from stages.render.html import Html
from stages.reporting.headline import Verdict

FOLDER = Path(__file__).parent


def render_page(title: str, verdicts: list[Verdict], table: Html, sections: dict[str, Html], *, origin: str = "",
                first_look: str = "", folded: Container[str] = ()) -> str:
    """Render the whole document: title, first look, verdicts, short table, and sections by heading with links to them.

    What is not `Html` is escaped.

    Args:
        origin: which run, of what day and code, beside the title.
        folded: headings of the sections that open on a click.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True,
        keep_trailing_newline=True)
    style, script = (Html((FOLDER / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    return environment.get_template("page.html.jinja").render(
        title=title, origin=origin, first_look=first_look, verdicts=verdicts, table=table, sections=sections,
        folded=folded, style=style, script=script,
        policy=content_security_policy(script))


def content_security_policy(script: str) -> str:
    """Return the policy that allows embedded figures and styles, this script, and nothing else."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
            f"base-uri 'none'; form-action 'none'")
