"""BeautifulSoup's tree of a post, read in a quarter less of the converter's time where the post is plain.

Nearly all posts are what the sites' own sanitiser lets through: a few dozen tags in lower case, attributes in double
quotes, a handful of entities. One expression takes such a post apart, and the tree is built by BeautifulSoup's own
handlers, with the calls that html.parser would make; one that is not plain to its last character goes to html.parser.
"""

import re
from html import unescape

from bs4.builder import HTMLParserTreeBuilder
from bs4.builder._htmlparser import BeautifulSoupHTMLParser

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
TEXT, ENTITY, END, START, EMPTY = 1, 2, 3, 5, 7  # number of the last group of each kind of token


class NoPlaces(BeautifulSoupHTMLParser):
    """html.parser that does not count lines, which nobody asks for."""

    def updatepos(self, i, j):
        return j


class PostBuilder(HTMLParserTreeBuilder):
    """Builds the tree of html.parser."""

    def feed(self, markup: str) -> None:
        tokens = _tokens(markup)
        if tokens is None:
            super().feed(markup, NoPlaces)
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
        """The last one counts where a name comes twice, as by default in BeautifulSoup."""
        found = self.attribute_dict_class()
        if text:
            found.update((name, unescape(value)) for name, value in ATTRIBUTE.findall(text))
        return found


def _tokens(markup: str) -> list[re.Match] | None:
    """The tokens of a plain post; None for any other."""
    tokens, following, at = [], TOKEN.scanner(markup).match, 0
    while token := following():
        tokens.append(token)
        at = token.end()
    return tokens if at == len(markup) else None
