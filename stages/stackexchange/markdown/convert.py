"""A post's HTML to Markdown, in bounded time and memory: "published", to repeat what was done, or "clean", to read.

"published" is byte for byte what the notebook of lvwerra/stack-exchange-paired calls, with the markdownify installed
here: defaults, a callback for the language of code, blank lines collapsed (in code too), both ends stripped, what UTF-8
cannot hold as "?". The notebook is known from the scripts that copied its function, all alike; its callback takes the
first class of the <pre> and of that the part after the last hyphen, so `lang-objective-c` gives `c`. Chosen here: no
language for `class=""`, where the notebook may have stopped, and markdownify's version, which nobody noted in 2023.
"""

import re
from collections.abc import Callable

from bs4 import Tag

from stages.stackexchange.markdown.clean import CleanConverter
from stages.stackexchange.markdown.limits import TOO_LONG, TOO_MANY_TAGS, BoundedConverter, Limits, NotConvertedError

Converter = Callable[[str, str], str]
STYLES = ("published", "clean")
BLANK_LINES = re.compile(r"\n\s*\n")


class PublishedConverter(BoundedConverter):
    def __init__(self, limits: Limits):
        super().__init__(limits, code_language_callback=published_language)

    def convert(self, html: str) -> str:
        return BLANK_LINES.sub("\n\n", super().convert(html)).strip()


def published_language(pre: Tag) -> str:
    classes = pre.get("class")
    return classes[0].rpartition("-")[2] if classes else ""


def converter(style: str, limits: Limits = Limits()) -> Converter:
    """A function from a post's text and its markup, "html" or "markdown", to Markdown in `style`.

    Markdown passes as it is. The function raises NotConvertedError, and nothing else; it is for one thread at a time.
    """
    if style not in STYLES:
        raise ValueError(f"markdown style {style!r} is none of {', '.join(STYLES)}")
    stock = (PublishedConverter if style == "published" else CleanConverter)(limits)

    def convert(text: str, markup: str) -> str:
        if len(text) > limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        if markup == "markdown":
            return text
        if text.count("<") > limits.max_tags:
            raise NotConvertedError(TOO_MANY_TAGS)
        try:
            markdown = stock.convert(text).encode("utf-8", "replace").decode()
        except NotConvertedError:
            raise
        except Exception as error:  # a post can reach any corner of parser and converter: drop it, never the run
            raise NotConvertedError(f"markdownify fails ({type(error).__name__})") from None
        if len(markdown) > limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        return markdown

    return convert
