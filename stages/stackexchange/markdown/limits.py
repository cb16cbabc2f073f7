"""Stock markdownify in bounded time and memory: what both styles of stages.stackexchange.markdown.convert stand on.

Posts are untrusted: deep nesting overflows the stack, and long lists, tables, runs of blanks and nested quotes are
quadratic in the parser or the converter. Each has a cap, far above what the sites' own 30,000-character limit lets a
post be, and a cap that a post cannot reach is not looked at.
"""

import re
import warnings
from dataclasses import dataclass

from bs4 import BeautifulSoup, NavigableString, Tag
from markdownify import MarkdownConverter

from stages.stackexchange.markdown.parser import PostBuilder

TOO_LONG, TOO_DEEP, TOO_MANY_TAGS = "too long", "nested too deeply", "too many tags"
TOO_BLANK, TOO_NESTED, TOO_BROKEN = "too much white space", "too much nested text", "too many broken tags"
ODD_NUMBER = "list starts at an absurd number"

LEVELS = 10  # a character may be converted this many times on average: once for each element around it
START_DIGITS = 9  # of a list's first number, as in CommonMark; every line of the list is indented by them
BROKEN_READ = 5_000_000  # characters; the end of a tag that has none is looked for up to the end of the post
KNOWN_NAMES = 1000  # of tags; a post may invent any


class NotConvertedError(ValueError):
    """This post has no Markdown; the text says why, in words that are the same for every post of the kind."""


@dataclass(frozen=True)
class Limits:
    max_characters: int = 200_000  # of a post's HTML, and of its Markdown
    max_tags: int = 5_000  # "<" in the HTML
    max_depth: int = 100  # nested elements; four Python frames each, whoever calls
    max_blanks: int = 1_000  # consecutive white space in the text


class QuickTag(Tag):
    """A tag that is searched by name alone without a matcher object: a sixth of markdownify's time, and the difference
    between seconds and a minute for a hostile table."""

    def find_parent(self, name=None, *rules, **more):
        if type(name) is not str or rules or more:
            return super().find_parent(name, *rules, **more)
        parent = self.parent
        while parent is not None and parent.name != name:
            parent = parent.parent
        return parent

    def find_previous_siblings(self, name=None, *rules, **more):
        if type(name) is not str or rules or more:
            return super().find_previous_siblings(name, *rules, **more)
        return [sibling for sibling in self.previous_siblings if sibling.name == name]

    def find_all(self, name=None, *rules, **more):
        names = [name] if type(name) is str else name
        if type(names) is not list or rules or more:
            return super().find_all(name, *rules, **more)
        return [element for element in self.descendants if element.name in names]


class QuickSoup(QuickTag, BeautifulSoup):
    """The element around them all."""


class WatchedSoup(QuickSoup):
    """Raises NotConvertedError where tags without an end would take the parser minutes."""

    def __init__(self, html: str, *features, **more):
        self.broken, self.most_broken = 0, BROKEN_READ // len(html)
        super().__init__(html, *features, **more)

    def handle_data(self, data):
        if data.startswith("<") and len(data) > 1:  # the parser gives up a tag as text
            self.broken += 1
            if self.broken > self.most_broken:
                raise NotConvertedError(TOO_BROKEN)
        super().handle_data(data)


class BoundedConverter(MarkdownConverter):
    """markdownify whose `convert` raises NotConvertedError when a post is over a limit."""

    def __init__(self, limits: Limits, **options):
        super().__init__(**options)
        self.limits = limits
        self.converted = 0  # characters, of all elements of the post so far

    def convert(self, html: str) -> str:
        self.converted = 0
        if len(self.convert_fn_cache) > KNOWN_NAMES:
            self.convert_fn_cache.clear()
        return self.convert_soup(self.tree(html))

    def tree(self, html: str) -> BeautifulSoup:
        tags = html.count("<")
        kind = WatchedSoup if tags * len(html) > BROKEN_READ else QuickSoup
        with warnings.catch_warnings(action="ignore"):  # a post that is one URL, or XML
            soup = kind(html, builder=PostBuilder(store_line_numbers=False), element_classes={Tag: QuickTag})
        if tags >= self.limits.max_depth and tags - html.count("</") >= self.limits.max_depth:
            check_depth(soup, self.limits.max_depth)
        if len(html) > self.limits.max_blanks and most_blanks(html) > self.limits.max_blanks:
            check_blanks(soup, self.limits.max_blanks)
        return soup

    def process_element(self, node, parent_tags=None):
        if isinstance(node, NavigableString):
            return self.process_text(node, parent_tags=parent_tags)
        text = self.process_tag(node, parent_tags=parent_tags)
        self.converted += len(text)
        if self.converted > self.limits.max_characters:
            self.check_growth(text)
        return text

    def check_growth(self, text: str) -> None:
        if len(text) > self.limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        if self.converted > LEVELS * self.limits.max_characters:
            raise NotConvertedError(TOO_NESTED)

    def convert_li(self, el, text, parent_tags):
        if len(el.parent.get("start") or "") > START_DIGITS:
            raise NotConvertedError(ODD_NUMBER)
        return super().convert_li(el, text, parent_tags)


def check_depth(soup: BeautifulSoup, most: int) -> None:
    depths = {id(soup): 0}
    for element in soup.descendants:
        if isinstance(element, Tag):
            depths[id(element)] = depth = depths[id(element.parent)] + 1
            if depth > most:
                raise NotConvertedError(TOO_DEEP)


def most_blanks(html: str) -> int:
    """White space that the text of `html` may have at most: it stands there, or an entity gives two characters."""
    return len(html) - sum(map(len, html.split())) + 2 * html.count("&")


def check_blanks(soup: BeautifulSoup, most: int) -> None:
    """Of all strings: those of scripts, and what is between tags, go through the same expressions as text."""
    text = "".join(part for part in soup.descendants if isinstance(part, NavigableString))
    if any(len(run.group()) > most for run in re.finditer(r"\s+", text)):
        raise NotConvertedError(TOO_BLANK)
