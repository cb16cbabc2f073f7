"""Convert a post's HTML to Markdown, in bounded time and memory, in the style "published" or "clean".

"published" does exactly what the notebook of lvwerra/stack-exchange-paired does, with the installed markdownify: its
defaults, a callback for the language of code, blank lines collapsed (in code too), both ends stripped, and "?" for what
UTF-8 cannot encode. The notebook is known from scripts that copied its function, all identical. Its callback takes the
part after the last hyphen of the <pre>'s first class, so `lang-objective-c` gives `c`. Two choices are ours: no
language for `class=""`, where the notebook may have failed, and the version of markdownify, which was not recorded in
2023.

"clean" is for reading.
"""

import re
from collections.abc import Callable

from bs4 import Comment, Declaration, Doctype, NavigableString, ProcessingInstruction, Tag
from markdownify import ATX, MarkdownConverter, abstract_inline_conversion, chomp

from stages.stackexchange.markdown import limits
from stages.stackexchange.markdown.limits import TOO_LONG, TOO_MANY_TAGS, BoundedConverter, NotConvertedError

MARK = "\0"  # not allowed in HTML, and replaced by U+FFFD
MARKED_LINE = re.compile(f"^([^{MARK}\n]*){MARK}([0-9]+){MARK}$", re.MULTILINE)
MARK_IN_LINE = re.compile(f"({MARK}[0-9]+{MARK})(?!\n|\\Z)")
CONTAINERS = re.compile(r"(?:[ >!]|[-:] |[0-9]+\. )*")  # before a block: quote signs, list items, indent
FENCE = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)
NEWLINES = re.compile(r"\r\n?")
EXTRA_LINES = re.compile(r"\n{3,}")
BACKTICKS = re.compile("`+")
NO_TEXT = (Comment, Declaration, Doctype, ProcessingInstruction)

NAMED_LANGUAGE = re.compile(r"lang(?:uage)?-([\w+#.-]{1,30})", re.ASCII)
BARE_LANGUAGE = re.compile(r"[A-Za-z][\w+#.]{0,29}", re.ASCII)  # without hyphen: names with one are styles
NO_LANGUAGE = {"none", "default", "prettyprint", "prettyprinted", "linenums", "hljs", "highlight", "code", "override",
               "snippet", "nohighlight", "plaintext"}
Converter = Callable[[str, str], str]
STYLES = ("published", "clean")
BLANK_LINES = re.compile(r"\n\s*\n")


class CleanConverter(BoundedConverter):
    """Convert to the clean style, stripped at both ends: code as its author typed it, prose and mathematics unescaped.

    Uses markdownify's options and methods. Blocks of code are replaced by a mark that no text can contain while the
    text around them is tidied, and inserted last, each line behind the indent or quote signs of the mark's line.
    Elements for which Markdown has no syntax and that Stack Exchange's editor accepts as HTML (kbd, sub, sup) stay
    HTML, which GitHub renders as well: `H<sub>2</sub>O` cannot be mistaken for mathematics.
    """

    def __init__(self):
        super().__init__(heading_style=ATX, bullets="-", escape_asterisks=False, escape_underscores=False,
                         sub_symbol="<sub>", sup_symbol="<sup>", table_infer_header=True)
        self.codes: list[str] = []

    def convert(self, html: str) -> str:
        self.codes.clear()
        text = super().convert(NEWLINES.sub("\n", html).replace(MARK, "\ufffd"))
        text = "\n".join(line.rstrip() for line in MARK_IN_LINE.sub(r"\1\n\n", text).split("\n"))
        self.converted = 0  # from here on, characters of code
        return MARKED_LINE.sub(self._insert_code, EXTRA_LINES.sub("\n\n", text).strip())

    def _insert_code(self, line: re.Match) -> str:
        """Replace a marked line by the lines of its code, each behind the quote signs and the indent of the first."""
        before, number = line.groups()
        first, *others = self.codes[int(number)].split("\n")
        self.converted += sum(map(len, others)) + len(before) * len(others)
        if self.converted > limits.MAX_CHARACTERS:
            raise NotConvertedError(TOO_LONG)
        if not CONTAINERS.fullmatch(before):  # bold text or a term: only broken HTML has this
            return "\n".join([before.rstrip(), "", first, *others])
        indent = re.sub("[^>!]", " ", before)
        return "\n".join([before + first, *(indent + line if line else indent.rstrip() for line in others)])

    def process_element(self, node, parent_tags=None):
        if isinstance(node, NO_TEXT):
            return ""
        if node.name == "pre":
            return self.convert_pre(node, "", parent_tags)
        if node.name in ("code", "samp") and "_noformat" not in parent_tags:
            return format_inline_code(raw_text(node))
        return super().process_element(node, parent_tags)

    def escape(self, text, parent_tags):
        return text.replace("```", "\\```")  # three start a block of code wherever a line breaks

    def convert_pre(self, el, text, parent_tags):
        code = code_text(el).removesuffix("\n")
        if not code.strip():
            return ""
        if "_inline" in parent_tags:  # a table cell or a heading has one line
            return format_inline_code(code)
        fence = "`" * max([3, *(len(run) + 1 for run in FENCE.findall(code))])
        self.codes.append(f"{fence}{code_language(el)}\n{code}\n{fence}")
        return f"\n\n{MARK}{len(self.codes) - 1}{MARK}\n\n"

    def convert_a(self, el, text, parent_tags):
        href, title = el.get("href"), el.get("title")
        before, after, text = chomp(text)
        if "_noformat" in parent_tags or not href or not text or MARK in text:
            return before + text + after
        if text == href and not title and re.match(r"(?:https?|ftp|mailto):\S+$", href):
            return f"{before}<{href}>{after}"
        return f"{before}[{join_lines(text)}]({link_destination(href, title)}){after}"

    def convert_img(self, el, text, parent_tags):
        alt = join_lines(el.get("alt") or "")
        if "_inline" in parent_tags or not el.get("src"):
            return alt
        return f"![{alt}]({link_destination(el['src'], el.get('title'))})"

    def convert_blockquote(self, el, text, parent_tags):
        quote = super().convert_blockquote(el, text, parent_tags)
        if "spoiler" in el.get("class", ()) and "_inline" not in parent_tags:
            return re.sub("^>", ">!", quote, flags=re.MULTILINE)  # as in the sites' own Markdown
        return quote

    def convert_td(self, el, text, parent_tags):
        return super().convert_td(el, text.replace("|", "\\|"), parent_tags)

    def convert_th(self, el, text, parent_tags):
        return super().convert_th(el, text.replace("|", "\\|"), parent_tags)

    convert_kbd = abstract_inline_conversion(lambda self: "<kbd>")
    convert_strike = MarkdownConverter.convert_del


def raw_text(el: Tag) -> str:
    """Return the text of an element unchanged, with line breaks."""
    return "".join("\n" if part.name == "br" else part for part in el.descendants if part.name == "br"
                   or (isinstance(part, NavigableString) and not isinstance(part, NO_TEXT)))


def code_text(pre: Tag) -> str:
    """Return the text of the only <code> in a <pre>, or that of the <pre> without its first line break, as in HTML."""
    children = [child for child in pre.contents if child.name or child.strip()]
    if len(children) == 1 and children[0].name == "code":
        return raw_text(children[0])
    return raw_text(pre).removeprefix("\n")


def join_lines(text: str) -> str:
    """Strip the lines and join them by spaces."""
    return " ".join(line.strip() for line in text.split("\n")) if "\n" in text else text


def format_inline_code(code: str) -> str:
    """Format a span of code, on one line, between more backticks than it has in a row."""
    code = join_lines(code)
    if not code.strip():
        return code
    ticks = "`" * (max(map(len, BACKTICKS.findall(code)), default=0) + 1)
    # Markdown strips one space from both ends if both have one.
    gap = " " if code[0] == "`" or code[-1] == "`" or code[0] == code[-1] == " " else ""
    return f"{ticks}{gap}{code}{gap}{ticks}"


def link_destination(url: str, title: str | None) -> str:
    """Format the content of a link's parentheses; a URL that would end early is put in angle brackets."""
    url = join_lines(url.strip())
    if re.search(r"[\s<>]", url) or url.count("(") != url.count(")"):
        url = "<" + url.replace("<", "%3C").replace(">", "%3E") + ">"
    if not title:
        return url
    quoted = join_lines(title).replace('"', '\\"')
    return f'{url} "{quoted}"'


def code_language(pre: Tag) -> str:
    """Return the language that a class of the <pre>, or of the first <code> in it, names; "" if there is none."""
    classes = [name for el in (pre, *pre.find_all("code")[:1]) for name in el.get("class", ())]
    named = [match[1] for name in classes if (match := NAMED_LANGUAGE.fullmatch(name))]
    bare = [name for name in classes if BARE_LANGUAGE.fullmatch(name)]
    return next((name for name in named + bare if name.lower() not in NO_LANGUAGE), "")


class PublishedConverter(BoundedConverter):
    """Converts to the published style."""

    def __init__(self):
        super().__init__(code_language_callback=published_language)

    def convert(self, html: str) -> str:
        return BLANK_LINES.sub("\n\n", super().convert(html)).strip()


def published_language(pre: Tag) -> str:
    """Return the language of a block of code as the notebook does; "" without a class."""
    classes = pre.get("class")
    return classes[0].rpartition("-")[2] if classes else ""


def make_converter(style: str) -> Converter:
    """Make a function (text, markup) -> Markdown in `style`, for one thread at a time.

    Its markup is "html", or "markdown" for text that is returned unchanged. It raises NotConvertedError and nothing
    else.
    """
    if style not in STYLES:
        raise ValueError(f"markdown style {style!r} is none of {', '.join(STYLES)}")
    converter = (PublishedConverter if style == "published" else CleanConverter)()

    def convert(text: str, markup: str) -> str:
        if len(text) > limits.MAX_CHARACTERS:
            raise NotConvertedError(TOO_LONG)
        if markup == "markdown":
            return text
        if text.count("<") > limits.MAX_TAGS:
            raise NotConvertedError(TOO_MANY_TAGS)
        try:
            markdown = converter.convert(text).encode("utf-8", "replace").decode()
        except NotConvertedError:
            raise
        except Exception as error:  # hostile HTML can fail anywhere in parser and converter: drop the post, not the run
            raise NotConvertedError(f"markdownify fails ({type(error).__name__})") from None
        if len(markdown) > limits.MAX_CHARACTERS:
            raise NotConvertedError(TOO_LONG)
        return markdown

    return convert
