"""Markdown to read and to learn from: code as its author typed it, prose and mathematics without escapes.

markdownify with the options and methods it offers for this. Code waits aside while the text around it is tidied, as a
mark that no text can hold, and comes back last with the indent or quote signs of its line before each of its own.
Elements that Markdown has no sign for and that Stack Exchange's own editor takes as HTML (kbd, sub, sup) stay HTML,
which GitHub shows as well: `H<sub>2</sub>O` is read by people and by models, and cannot be mistaken for mathematics.
"""

import re

from bs4 import Comment, Declaration, Doctype, NavigableString, ProcessingInstruction, Tag
from markdownify import ATX, MarkdownConverter, abstract_inline_conversion, chomp

from stages.stackexchange.markdown.limits import TOO_LONG, BoundedConverter, Limits, NotConvertedError

MARK = "\0"  # HTML has no such character: U+FFFD stands for it
MARKED_LINE = re.compile(f"^([^{MARK}\n]*){MARK}([0-9]+){MARK}$", re.MULTILINE)
MARK_IN_LINE = re.compile(f"({MARK}[0-9]+{MARK})(?!\n|\\Z)")
CONTAINERS = re.compile(r"(?:[ >!]|[-:] |[0-9]+\. )*")  # what may stand before a block: quotes, items, indent
FENCE = re.compile(r"^[ \t]*(`{3,})", re.MULTILINE)
NEWLINES = re.compile(r"\r\n?")
BLANK_LINES = re.compile(r"\n{3,}")
BACKTICKS = re.compile("`+")
NO_TEXT = (Comment, Declaration, Doctype, ProcessingInstruction)

NAMED_LANGUAGE = re.compile(r"lang(?:uage)?-([\w+#.-]{1,30})", re.ASCII)
BARE_LANGUAGE = re.compile(r"[A-Za-z][\w+#.]{0,29}", re.ASCII)  # no hyphen: those are names of styles
NO_LANGUAGE = {"none", "default", "prettyprint", "prettyprinted", "linenums", "hljs", "highlight", "code", "override",
               "snippet", "nohighlight", "plaintext"}


class CleanConverter(BoundedConverter):
    """`convert` gives the clean style, stripped at both ends."""

    def __init__(self, limits: Limits):
        super().__init__(limits, heading_style=ATX, bullets="-", escape_asterisks=False, escape_underscores=False,
                         sub_symbol="<sub>", sup_symbol="<sup>", table_infer_header=True)
        self.codes: list[str] = []

    def convert(self, html: str) -> str:
        self.codes.clear()
        text = super().convert(NEWLINES.sub("\n", html).replace(MARK, "\ufffd"))
        text = "\n".join(line.rstrip() for line in MARK_IN_LINE.sub(r"\1\n\n", text).split("\n"))
        self.converted = 0  # characters of code, from here
        return MARKED_LINE.sub(self.block, BLANK_LINES.sub("\n\n", text).strip())

    def block(self, line: re.Match) -> str:
        """A marked line as the lines of its code, each behind the quote signs and the indent of the first."""
        before, number = line.groups()
        first, *others = self.codes[int(number)].split("\n")
        self.converted += sum(map(len, others)) + len(before) * len(others)
        if self.converted > self.limits.max_characters:
            raise NotConvertedError(TOO_LONG)
        if not CONTAINERS.fullmatch(before):  # in bold type, or a term: what only broken HTML has
            return "\n".join([before.rstrip(), "", first, *others])
        indent = re.sub("[^>!]", " ", before)
        return "\n".join([before + first, *(indent + line if line else indent.rstrip() for line in others)])

    def process_element(self, node, parent_tags=None):
        if isinstance(node, NO_TEXT):
            return ""
        if node.name == "pre":
            return self.convert_pre(node, "", parent_tags)
        if node.name in ("code", "samp") and "_noformat" not in parent_tags:
            return inline_code(text_of(node))
        return super().process_element(node, parent_tags)

    def escape(self, text, parent_tags):
        return text.replace("```", "\\```")  # three begin a block of code, wherever a line breaks

    def convert_pre(self, el, text, parent_tags):
        code = code_of(el).removesuffix("\n")
        if not code.strip():
            return ""
        if "_inline" in parent_tags:  # a table's cell and a heading have one line
            return inline_code(code)
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
        return f"{before}[{one_line(text)}]({destination(href, title)}){after}"

    def convert_img(self, el, text, parent_tags):
        alt = one_line(el.get("alt") or "")
        if "_inline" in parent_tags or not el.get("src"):
            return alt
        return f"![{alt}]({destination(el['src'], el.get('title'))})"

    def convert_blockquote(self, el, text, parent_tags):
        quote = super().convert_blockquote(el, text, parent_tags)
        if "spoiler" in el.get("class", ()) and "_inline" not in parent_tags:
            return re.sub("^>", ">!", quote, flags=re.MULTILINE)  # as the sites' own Markdown has it
        return quote

    def convert_td(self, el, text, parent_tags):
        return super().convert_td(el, text.replace("|", "\\|"), parent_tags)

    def convert_th(self, el, text, parent_tags):
        return super().convert_th(el, text.replace("|", "\\|"), parent_tags)

    convert_kbd = abstract_inline_conversion(lambda self: "<kbd>")
    convert_strike = MarkdownConverter.convert_del


def text_of(el: Tag) -> str:
    """The text of an element as it is, line breaks too."""
    return "".join("\n" if part.name == "br" else part for part in el.descendants if part.name == "br"
                   or (isinstance(part, NavigableString) and not isinstance(part, NO_TEXT)))


def code_of(pre: Tag) -> str:
    """The text of the <code> that is all of a <pre>, else the text of the <pre> but for the line break it opens with,
    which HTML does not count."""
    inside = [part for part in pre.contents if part.name or part.strip()]
    if len(inside) == 1 and inside[0].name == "code":
        return text_of(inside[0])
    return text_of(pre).removeprefix("\n")


def one_line(text: str) -> str:
    return " ".join(line.strip() for line in text.split("\n")) if "\n" in text else text


def inline_code(code: str) -> str:
    """A span of code, on one line, with more backticks around it than stand together in it."""
    code = one_line(code)
    if not code.strip():
        return code
    ticks = "`" * (max(map(len, BACKTICKS.findall(code)), default=0) + 1)
    # Markdown takes a space off both ends, where both have one.
    gap = " " if code[0] == "`" or code[-1] == "`" or code[0] == code[-1] == " " else ""
    return f"{ticks}{gap}{code}{gap}{ticks}"


def destination(url: str, title: str | None) -> str:
    """What stands in a link's parentheses; a URL that Markdown would end early stands in angle brackets."""
    url = one_line(url.strip())
    if re.search(r"[\s<>]", url) or url.count("(") != url.count(")"):
        url = "<" + url.replace("<", "%3C").replace(">", "%3E") + ">"
    if not title:
        return url
    quoted = one_line(title).replace('"', '\\"')
    return f'{url} "{quoted}"'


def code_language(pre: Tag) -> str:
    """What a class of the <pre>, or of the first <code> in it, names the language; "" for none."""
    classes = [name for el in (pre, *pre.find_all("code")[:1]) for name in el.get("class", ())]
    named = [found[1] for name in classes if (found := NAMED_LANGUAGE.fullmatch(name))]
    bare = [name for name in classes if BARE_LANGUAGE.fullmatch(name)]
    return next((name for name in named + bare if name.lower() not in NO_LANGUAGE), "")
