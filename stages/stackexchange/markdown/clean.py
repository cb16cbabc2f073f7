"""Convert to Markdown in the "clean" style: code as its author typed it, prose and mathematics without escapes.

Uses markdownify's options and methods. Blocks of code are replaced by a mark that no text can contain while the text
around them is tidied, and inserted last, each line behind the indent or quote signs of the mark's line. Elements for
which Markdown has no syntax and that Stack Exchange's editor accepts as HTML (kbd, sub, sup) stay HTML, which GitHub
renders as well: `H<sub>2</sub>O` cannot be mistaken for mathematics.
"""

import re

from bs4 import Comment, Declaration, Doctype, NavigableString, ProcessingInstruction, Tag
from markdownify import ATX, MarkdownConverter, abstract_inline_conversion, chomp

from stages.stackexchange.markdown.limits import TOO_LONG, BoundedConverter, Limits, NotConvertedError

MARK = "\0"  # not allowed in HTML, and replaced by U+FFFD
MARKED_LINE = re.compile(f"^([^{MARK}\n]*){MARK}([0-9]+){MARK}$", re.MULTILINE)
MARK_IN_LINE = re.compile(f"({MARK}[0-9]+{MARK})(?!\n|\\Z)")
CONTAINERS = re.compile(r"(?:[ >!]|[-:] |[0-9]+\. )*")  # before a block: quote signs, list items, indent
FENCE = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)
NEWLINES = re.compile(r"\r\n?")
BLANK_LINES = re.compile(r"\n{3,}")
BACKTICKS = re.compile("`+")
NO_TEXT = (Comment, Declaration, Doctype, ProcessingInstruction)

NAMED_LANGUAGE = re.compile(r"lang(?:uage)?-([\w+#.-]{1,30})", re.ASCII)
BARE_LANGUAGE = re.compile(r"[A-Za-z][\w+#.]{0,29}", re.ASCII)  # without hyphen: names with one are styles
NO_LANGUAGE = {"none", "default", "prettyprint", "prettyprinted", "linenums", "hljs", "highlight", "code", "override",
               "snippet", "nohighlight", "plaintext"}


class CleanConverter(BoundedConverter):
    """Converts to the clean style, stripped at both ends."""

    def __init__(self, limits: Limits):
        super().__init__(limits, heading_style=ATX, bullets="-", escape_asterisks=False, escape_underscores=False,
                         sub_symbol="<sub>", sup_symbol="<sup>", table_infer_header=True)
        self.codes: list[str] = []

    def convert(self, html: str) -> str:
        self.codes.clear()
        text = super().convert(NEWLINES.sub("\n", html).replace(MARK, "\ufffd"))
        text = "\n".join(line.rstrip() for line in MARK_IN_LINE.sub(r"\1\n\n", text).split("\n"))
        self.converted = 0  # from here on, characters of code
        return MARKED_LINE.sub(self._insert_code, BLANK_LINES.sub("\n\n", text).strip())

    def _insert_code(self, line: re.Match) -> str:
        """Replace a marked line by the lines of its code, each behind the quote signs and the indent of the first."""
        before, number = line.groups()
        first, *others = self.codes[int(number)].split("\n")
        self.converted += sum(map(len, others)) + len(before) * len(others)
        if self.converted > self.limits.max_characters:
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
