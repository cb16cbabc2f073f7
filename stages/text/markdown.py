"""A post's HTML to Markdown, as published (markdownify, the code's language, blank lines), in bounded time and memory.

Posts are untrusted: deep nesting overflows the stack, and long lists, runs of blanks and unclosed tags are quadratic in
the parser or the converter. Each has a cap here, far above what the sites' own 30,000-character limit lets a post be.
"""

import re
import warnings

from bs4 import BeautifulSoup, MarkupResemblesLocatorWarning, Tag
from markdownify import MarkdownConverter

MAX_CHARACTERS = 200_000  # of HTML, and of Markdown
MAX_TAGS = 5_000  # opening and closing together
MAX_DEPTH = 100  # three Python frames each, whoever calls
MAX_BLANKS = 1_000  # consecutive white space in the text
TOO_DEEP, TOO_LONG, TOO_MANY_TAGS, TOO_BLANK = "nested too deeply", "too long", "too many tags", "too much white space"

BLANK_LINES = re.compile(r"\n\s*\n")
LANGUAGE = re.compile(r"[\w+#.-]{1,30}", re.ASCII)
NO_LANGUAGE = {"default", "none", "prettyprint", "prettyprint-override", "s-code-block", "hljs"}


class NotConvertedError(ValueError):
    """This post has no Markdown; the text says why, in words that are the same for every post of the kind."""


def markdown_of(text: str, markup: str) -> str:
    """Markdown of a post whose text is "html" or "markdown" already. Raises NotConvertedError, and nothing else."""
    if len(text) > MAX_CHARACTERS:
        raise NotConvertedError(TOO_LONG)
    if markup == "markdown":
        return text
    if text.count("<") > MAX_TAGS:
        raise NotConvertedError(TOO_MANY_TAGS)
    try:
        markdown = CONVERTER.convert_soup(_checked(_soup(text)))
    except NotConvertedError:
        raise
    except Exception as error:  # a post can reach any corner of parser and converter: drop it, never the run
        raise NotConvertedError(type(error).__name__) from None
    if len(markdown) > MAX_CHARACTERS:
        raise NotConvertedError(TOO_LONG)
    return BLANK_LINES.sub("\n\n", markdown)  # in code too, as published


def _soup(html: str) -> BeautifulSoup:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MarkupResemblesLocatorWarning)  # a post that is one URL or file name
        return BeautifulSoup(html, "html.parser")


def _checked(soup: BeautifulSoup) -> BeautifulSoup:
    depths = {id(soup): 0}
    for element in soup.descendants:
        if isinstance(element, Tag):
            depths[id(element)] = depth = depths[id(element.parent)] + 1
            if depth > MAX_DEPTH:
                raise NotConvertedError(TOO_DEEP)
    if any(len(run.group()) > MAX_BLANKS for run in re.finditer(r"\s+", soup.get_text())):
        raise NotConvertedError(TOO_BLANK)
    return soup


def code_language(element: Tag) -> str:
    """Language of a <pre>: what `lang-` or `language-` names, else its first class, as published; "" for none."""
    classes = element.get("class") or []
    named = [name.partition("-")[2] for name in classes if name.startswith(("lang-", "language-"))]
    language = (named or classes or [""])[0]
    return language if LANGUAGE.fullmatch(language) and language not in NO_LANGUAGE else ""


CONVERTER = MarkdownConverter(code_language_callback=code_language)
