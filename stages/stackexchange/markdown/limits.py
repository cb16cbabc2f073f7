"""markdownify in bounded time and memory, and with a faster parser, the base of both styles.

Posts are untrusted: deep nesting overflows the stack, and long lists, tables, runs of blanks and nested quotes take
quadratic time in the parser or the converter. Each has a limit, far above what the sites' own limit of 30,000
characters allows. A limit that a post is too short to exceed is not checked.
"""

import re
import warnings
from html import unescape

from bs4 import BeautifulSoup, NavigableString, Tag
from bs4.builder import HTMLParserTreeBuilder
from bs4.builder._htmlparser import BeautifulSoupHTMLParser
from markdownify import MarkdownConverter

TOO_LONG, TOO_DEEP, TOO_MANY_TAGS = "too long", "nested too deeply", "too many tags"
TOO_BLANK, TOO_NESTED, TOO_BROKEN = "too much white space", "too much nested text", "too many broken tags"
ODD_NUMBER = "list starts at an absurd number"

MAX_CHARACTERS = 200_000  # of a post's HTML, and of its Markdown
MAX_TAGS = 5_000  # "<" in the HTML
MAX_DEPTH = 100  # nested elements; four Python frames each, whoever calls
MAX_BLANKS = 1_000  # consecutive white space in the text
LEVELS = 10  # how often a character may be converted on average: once for each element around it
START_DIGITS = 9  # of a list's first number, as in CommonMark; they indent every line of the list
BROKEN_TAG_CHARACTERS = 5_000_000  # an unclosed tag is searched for its end up to the end of the post
CACHED_TAG_NAMES = 1000  # posts may invent tag names without limit
PAIRED = (
    "p", "code", "pre", "a", "em", "strong", "ul", "ol", "li", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6", "sub",
    "sup", "kbd", "b", "i", "s", "strike", "del", "div", "span", "table", "thead", "tbody", "tr", "th", "td",
    "dl", "dt", "dd")
VOID = ("br", "hr", "img")
ENTITIES = {"lt": "<", "gt": ">", "amp": "&", "quot": '"', "nbsp": "\xa0", "#39": "'"}
ATTRIBUTE = re.compile(r' ([a-z-]+)="([^"<>]*)"')
ATTRIBUTES = r'((?: [a-z-]+="[^"<>]*")*)'
TOKEN = re.compile(rf"([^<&]+)|&({'|'.join(ENTITIES)});|</({'|'.join(PAIRED)})>|"
                   rf"<({'|'.join(PAIRED)}){ATTRIBUTES}>|<({'|'.join(VOID)}){ATTRIBUTES} ?/?>")
TEXT, ENTITY, END, START, EMPTY = 1, 2, 3, 5, 7  # last group of each kind of token


class NotConvertedError(ValueError):
    """A post cannot be converted; the message is the same for all posts with the same fault, so it can be counted."""


class FastTag(Tag):
    """A tag that searches by name without a matcher object.

    Saves a sixth of markdownify's time; a hostile table takes seconds instead of a minute.
    """

    def find_parent(self, name=None, *args, **kwargs):
        if type(name) is not str or args or kwargs:
            return super().find_parent(name, *args, **kwargs)
        parent = self.parent
        while parent is not None and parent.name != name:
            parent = parent.parent
        return parent

    def find_previous_siblings(self, name=None, *args, **kwargs):
        if type(name) is not str or args or kwargs:
            return super().find_previous_siblings(name, *args, **kwargs)
        return [sibling for sibling in self.previous_siblings if sibling.name == name]

    def find_all(self, name=None, *args, **kwargs):
        names = [name] if type(name) is str else name
        if type(names) is not list or args or kwargs:
            return super().find_all(name, *args, **kwargs)
        return [element for element in self.descendants if element.name in names]


class FastSoup(FastTag, BeautifulSoup):
    """The root element."""


class BoundedSoup(FastSoup):
    """Raises NotConvertedError when unclosed tags would take the parser minutes."""

    def __init__(self, html: str, *features, **kwargs):
        self.broken_tags, self.max_broken_tags = 0, BROKEN_TAG_CHARACTERS // len(html)
        super().__init__(html, *features, **kwargs)

    def handle_data(self, data):
        if data.startswith("<") and len(data) > 1:  # the parser passes an unclosed tag on as text
            self.broken_tags += 1
            if self.broken_tags > self.max_broken_tags:
                raise NotConvertedError(TOO_BROKEN)
        super().handle_data(data)


class BoundedConverter(MarkdownConverter):
    """A markdownify converter that raises NotConvertedError if a post exceeds a limit."""

    converted = 0  # characters of all elements of a post so far

    def convert(self, html: str) -> str:
        self.converted = 0
        if len(self.convert_fn_cache) > CACHED_TAG_NAMES:
            self.convert_fn_cache.clear()
        return self.convert_soup(self.parse(html))

    def parse(self, html: str) -> BeautifulSoup:
        tags = html.count("<")
        soup_class = BoundedSoup if tags * len(html) > BROKEN_TAG_CHARACTERS else FastSoup
        with warnings.catch_warnings(action="ignore"):  # a post that is one URL, or XML
            soup = soup_class(html, builder=PostBuilder(store_line_numbers=False), element_classes={Tag: FastTag})
        if tags >= MAX_DEPTH and tags - html.count("</") >= MAX_DEPTH:
            check_depth(soup)
        if len(html) > MAX_BLANKS and blank_bound(html) > MAX_BLANKS:
            check_blanks(soup)
        return soup

    def process_element(self, node, parent_tags=None):
        if isinstance(node, NavigableString):
            return self.process_text(node, parent_tags=parent_tags)
        text = self.process_tag(node, parent_tags=parent_tags)
        self.converted += len(text)
        if len(text) > MAX_CHARACTERS:
            raise NotConvertedError(TOO_LONG)
        if self.converted > LEVELS * MAX_CHARACTERS:
            raise NotConvertedError(TOO_NESTED)
        return text

    def convert_li(self, el, text, parent_tags):
        if len(el.parent.get("start") or "") > START_DIGITS:
            raise NotConvertedError(ODD_NUMBER)
        return super().convert_li(el, text, parent_tags)


def check_depth(soup: BeautifulSoup) -> None:
    """Raise NotConvertedError if elements are nested too deeply."""
    depths = {id(soup): 0}
    for element in soup.descendants:
        if isinstance(element, Tag):
            depths[id(element)] = depth = depths[id(element.parent)] + 1
            if depth > MAX_DEPTH:
                raise NotConvertedError(TOO_DEEP)


def blank_bound(html: str) -> int:
    """Bound the white space in the text of `html`: it is in the source, or an entity expands to two characters."""
    return len(html) - sum(map(len, html.split())) + 2 * html.count("&")


def check_blanks(soup: BeautifulSoup) -> None:
    """Raise NotConvertedError if a string, also of a script or between tags, has too much white space in a row."""
    text = "".join(part for part in soup.descendants if isinstance(part, NavigableString))
    if any(len(run.group()) > MAX_BLANKS for run in re.finditer(r"\s+", text)):
        raise NotConvertedError(TOO_BLANK)


class LinelessParser(BeautifulSoupHTMLParser):
    """html.parser without line numbers, which are not used."""

    def updatepos(self, i, j):
        return j


class PostBuilder(HTMLParserTreeBuilder):
    """Build BeautifulSoup's tree of a plain post faster than html.parser does, and the same one.

    Nearly all posts contain only what the sites' sanitiser lets through: a few dozen tags in lower case, attributes in
    double quotes, a handful of entities. One regular expression splits such a post into tokens, and BeautifulSoup's own
    handlers build the tree, with the calls that html.parser would make. Any other post goes to html.parser.

    It saves 9 % of the CPU seconds of the pairs stage in the published style and 16 % in the clean style (seven small
    sites, 3,156 questions, one process, medians of 3 and 2 runs in turns on a busy machine: 6.2 instead of 6.9 s, and
    5.8 instead of 6.9 s), with the same bytes.
    """

    def feed(self, markup: str) -> None:
        tokens = _tokenize(markup)
        if tokens is None:
            super().feed(markup, LinelessParser)
            return
        soup = self.soup
        for token in tokens:
            kind = token.lastindex
            if kind == TEXT:
                soup.current_data.append(token[TEXT])
            elif kind == ENTITY:
                soup.current_data.append(ENTITIES[token[ENTITY]])
            elif kind == END:
                soup.handle_endtag(token[END])
            else:
                soup.handle_starttag(token[kind - 1], None, None, self._attributes(token[kind]))
                if kind == EMPTY:
                    soup.handle_endtag(token[kind - 1])

    def _attributes(self, text: str) -> dict[str, str]:
        """Parse attributes; the last of equal names counts, as by default in BeautifulSoup."""
        attributes = self.attribute_dict_class()
        if text:
            attributes.update((name, unescape(value)) for name, value in ATTRIBUTE.findall(text))
        return attributes


def _tokenize(markup: str) -> list[re.Match] | None:
    """Split a plain post into tokens; None for any other post."""
    tokens, match_next, end = [], TOKEN.scanner(markup).match, 0
    while token := match_next():
        tokens.append(token)
        end = token.end()
    return tokens if end == len(markup) else None
