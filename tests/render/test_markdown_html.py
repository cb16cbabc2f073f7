"""Markdown on the demo page: what people write is rendered, and hostile text has no effect."""

import re
import time

import pytest
from bs4 import BeautifulSoup

from stages.render.markdown_html import MAX_CHARACTERS, MAX_NESTING, render_markdown

TAGS = {"p", "ul", "ol", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td", "hr",
        "br", "h3", "h4", "h5", "h6", "pre", "code", "a"}
ATTRIBUTES = {"href", "rel", "target", "dir", "start", "class"}
HOSTILE = [
    "<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "a <b onclick=alert(1)>bold</b>",
    "<svg/onload=alert(1)>",
    "<div>\n\n**text** <iframe src='http://evil.example'></iframe>\n\n</div>", "<!-- comment --><style>*{}</style>",
    "[text](javascript:alert(1))", "[text](JaVaScRiPt&#58;alert(1))", "[text](  java\nscript:alert(1))",
    "[text](&#106;avascript:alert(1))", "[text](data:text/html;base64,PHNjcmlwdD4=)", "[text](vbscript:x)",
    "[text](file:///etc/passwd)", "[text](//evil.example/x)", "[text](/gradio_api/upload)", "<javascript:alert(1)>",
    "[a]: javascript:alert(1)\n\n[a]", '[text](http://a.example "\\" onmouseover=alert(1)")',
    '[text](http://a.example/"onmouseover="alert(1))', "![x](http://evil.example/pixel.png)",
    "![x](data:image/png;base64,AAAA)", "![<script>](javascript:alert(1))",
    "[![x](http://evil.example/1)](javascript:1)",
    '```"><script>alert(1)</script>\ncode</code></pre><script>alert(2)</script>\n```',
    "`</code><script>alert(1)</script>`", "| <script> | b |\n|-|-|\n| <img src=x> | `</td>` |",
    "\x00\x1b[31m<\x00script>",
    "&lt;script&gt;alert(1)&lt;/script&gt; &#60;img src=x&#62;"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_has_no_effect(text):
    page = BeautifulSoup(render_markdown(text), "lxml")
    elements = page.body.find_all(True)
    assert elements and {tag.name for tag in elements} <= TAGS
    assert {name for tag in elements for name in tag.attrs} <= ATTRIBUTES
    for tag in page.find_all("a"):
        assert re.match(r"https?://[\w.]+\.example/?", tag["href"]) and "noopener" in tag["rel"], tag
    assert not page.find_all("a", href=re.compile("script:|data:"))


def test_tags_are_shown_as_text():
    text = "a <b>c</b> <script>1</script>"
    assert BeautifulSoup(render_markdown(text), "lxml").p.text == text


def test_what_people_write():
    html = render_markdown(
        "# Title\n\nUse `a --flag`, **not** *b* or ~~c~~:  \nsee [the page](https://a.example/x?y=1&z=2).\n\n"
        "```sh\nls <folder>\n\ncd\n```\n\n3. one\n4. two\n\n> quoted\n\n---\n\n| a | b |\n|---|---|\n| 1 |  |\n")
    assert "<h3>Title</h3>" in html and "<code>a --flag</code>, <strong>not</strong> <em>b</em> or <s>c</s>" in html
    assert '<br>see <a href="https://a.example/x?y=1&amp;z=2" rel="noopener noreferrer nofollow" target=' in html
    assert '<pre dir="ltr"><code>ls &lt;folder&gt;\n\ncd\n</code></pre>' in html
    assert '<ol start="3"><li>one</li><li>two</li></ol>' in html
    assert "<blockquote><p>quoted</p></blockquote><hr>" in html
    assert "<tbody><tr><td>1</td><td></td></tr></tbody>" in html


def test_an_image_is_a_link_and_is_not_loaded():
    html = render_markdown("![a cat](https://a.example/cat.png)")
    assert html == ('<p><a href="https://a.example/cat.png" rel="noopener noreferrer nofollow" target="_blank">'
                    'image: a cat</a></p>')


@pytest.mark.parametrize("text", ["> " * MAX_NESTING + "deep", "- " * MAX_NESTING + "deep", "[a]: https://a.example",
                                  "*" * 99 + "deep" + "*" * 99, "x" * (MAX_CHARACTERS + 1), "\\", "-", "```"])
def test_no_text_disappears(text):
    shown = BeautifulSoup(render_markdown(text), "lxml").text
    assert shown.strip() and re.findall(r"\w", text) == re.findall(r"\w", shown)


@pytest.mark.parametrize("text", ["[", "![", "[a](", "*a ", "a**b", "```\n", "> ", "- ", "|a", "<a", "&", "\\", "_a*"])
def test_hostile_text_takes_no_time(text):
    start = time.process_time()
    render_markdown(text * (MAX_CHARACTERS // len(text)))
    assert time.process_time() - start < 5


def test_half_an_answer_is_rendered_as_it_grows():
    text = "Use **this**:\n\n```\na\n\nb\n```\nand [a link](https://a.example)"
    assert all(render_markdown(text[:end]) for end in range(1, len(text) + 1))
    assert "<pre" in render_markdown(text[:text.index("b\n")])
