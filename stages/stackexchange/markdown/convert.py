"""Convert a post's HTML to Markdown, in bounded time and memory, in the style "published" or "clean".

"published" does exactly what the notebook of lvwerra/stack-exchange-paired does, with the installed markdownify: its
defaults, a callback for the language of code, blank lines collapsed (in code too), both ends stripped, and "?" for what
UTF-8 cannot encode. The notebook is known from scripts that copied its function, all identical. Its callback takes the
part after the last hyphen of the <pre>'s first class, so `lang-objective-c` gives `c`. Two choices are ours: no
language for `class=""`, where the notebook may have failed, and the version of markdownify, which was not recorded in
2023.

"clean" is for reading: stages/stackexchange/markdown/clean.py.
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
    """Converts to the published style."""

    def __init__(self, limits: Limits):
        super().__init__(limits, code_language_callback=published_language)

    def convert(self, html: str) -> str:
        return BLANK_LINES.sub("\n\n", super().convert(html)).strip()


def published_language(pre: Tag) -> str:
    """Return the language of a block of code as the notebook does; "" without a class."""
    classes = pre.get("class")
    return classes[0].rpartition("-")[2] if classes else ""


def make_converter(style: str, limits: Limits = Limits()) -> Converter:
    """Make a function (text, markup) -> Markdown in `style`, for one thread at a time.

    Its markup is "html", or "markdown" for text that is returned unchanged. It raises NotConvertedError and nothing
    else.
    """
    if style not in STYLES:
        raise ValueError(f"markdown style {style!r} is none of {', '.join(STYLES)}")
    converter = (PublishedConverter if style == "published" else CleanConverter)(limits)

    def convert(text: str, markup: str) -> str:
        if len(text) > limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        if markup == "markdown":
            return text
        if text.count("<") > limits.max_tags:
            raise NotConvertedError(TOO_MANY_TAGS)
        try:
            markdown = converter.convert(text).encode("utf-8", "replace").decode()
        except NotConvertedError:
            raise
        except Exception as error:  # hostile HTML can fail anywhere in parser and converter: drop the post, not the run
            raise NotConvertedError(f"markdownify fails ({type(error).__name__})") from None
        if len(markdown) > limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        return markdown

    return convert
