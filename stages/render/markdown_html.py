"""Render Markdown from models and posts as HTML.

markdown-it parses it with raw HTML off, so that a tag is text. The HTML is built from an allow-list of nodes of the
syntax tree, escaped by construction. Links go to http and https only, and an image becomes a link, so that showing an
answer requests nothing.
"""

import re

from markdown_it import MarkdownIt
from markdown_it.tree import SyntaxTreeNode

from stages.render.html import Html, element, join_html, link

MAX_CHARACTERS = 10_000  # parsing hostile text takes time that grows with its square
MAX_NESTING = 50  # markdown-it drops what is nested deeper
FIRST_HEADING, LAST_HEADING = 3, 6  # the page itself has the headings above
SAME_NAME = ("p", "ul", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td")
VISIBLE_TEXT = re.compile(r">\s*[^<\s]")
CODE_BLOCKS = ("fence", "code_block")


def render_markdown(text: str) -> Html:
    """Render Markdown; a text that is too long or too deeply nested, or has nothing to show, is shown as it is."""
    if len(text) <= MAX_CHARACTERS:
        tokens = build_parser().parse(text)
        if all(token.level < MAX_NESTING - 1 for block in tokens for token in (block, *(block.children or ()))):
            html = _render_children(SyntaxTreeNode(tokens))
            if VISIBLE_TEXT.search(html):
                return html
    return element("p", text, class_="plain")


def build_parser() -> MarkdownIt:
    """Build a parser of CommonMark with tables and strikethrough, without raw HTML."""
    return MarkdownIt("commonmark", {"html": False, "maxNesting": MAX_NESTING}).enable(["table", "strikethrough"])


def _render_node(node: SyntaxTreeNode) -> Html:
    if node.type in CODE_BLOCKS:
        return element("pre", element("code", node.content), dir="ltr")
    if node.type == "code_inline":
        return element("code", node.content)
    if node.type == "image":
        return link(f"image: {node.content or 'without a text'}", str(node.attrs.get("src", "")), target="_blank")
    if node.type == "softbreak":
        return Html("\n")
    if node.type in ("hardbreak", "hr"):
        return element(node.tag)
    return _render_container(node) if node.children else join_html([node.content] if node.type == "text" else [])


def _render_container(node: SyntaxTreeNode) -> Html:
    content = _render_children(node)
    if node.type == "link":
        return link(content, str(node.attrs.get("href", "")), target="_blank")
    if node.type == "heading":
        return element(f"h{min(FIRST_HEADING - 1 + int(node.tag[1]), LAST_HEADING)}", content)
    if node.type == "ordered_list":
        return element("ol", content, start=node.attrs.get("start"))
    return element(node.tag, content) if node.tag in SAME_NAME and not node.hidden else content


def _render_children(node: SyntaxTreeNode) -> Html:
    return join_html(map(_render_node, node.children))
