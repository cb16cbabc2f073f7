"""Test HTML to Markdown: golden shapes, both styles, code, and hostile posts."""

import html as entities
import random
import re
import time
import tracemalloc

import pytest
from bs4 import BeautifulSoup, Tag
from lxml import etree
from markdownify import markdownify

from stages.stackexchange.markdown import limits as bounds
from stages.stackexchange.markdown.convert import NotConvertedError, make_converter
from tests.helpers.stackexchange_dumps import REAL

POSTS = REAL / "coffee.stackexchange.com/Posts.xml"
STYLES = {style: make_converter(style) for style in ("published", "clean")}
SAME = None  # in both styles
GOLDEN = [  # name, HTML, published, clean
    ("two paragraphs", "<p>One.</p>\n\n<p>Two\nlines.</p>\n", "One.\n\nTwo\nlines.", SAME),
    ("emphasis", "<p>An <em>odd</em>, <strong>bold</strong> and <b><i>both</i></b> word</p>",
     "An *odd*, **bold** and ***both*** word", SAME),
    ("names with underscores", "<p>Call my_var.do_it(*args, **kw)</p>",
     "Call my\\_var.do\\_it(\\*args, \\*\\*kw)", "Call my_var.do_it(*args, **kw)"),
    ("inline mathematics", "<p>Let $x_i * y_j$ and \\(a_1\\) be</p>",
     "Let $x\\_i \\* y\\_j$ and \\(a\\_1\\) be", "Let $x_i * y_j$ and \\(a_1\\) be"),
    ("displayed mathematics", "<p>$$\\sum_{i=1}^n a_i*b_i \\\\ \\text{so}$$</p>",
     "$$\\sum\\_{i=1}^n a\\_i\\*b\\_i \\\\ \\text{so}$$", "$$\\sum_{i=1}^n a_i*b_i \\\\ \\text{so}$$"),
    ("brackets as text", "<p>if a &lt; b &amp;&amp; c &gt; d use &lt;b&gt; and &amp;amp;</p>",
     "if a < b && c > d use <b> and &amp;", SAME),
    ("code",
     '<p>Do</p>\n\n<pre class="lang-py prettyprint-override"><code>def f(a):\n    return a_b *'
     ' 2\n</code></pre>\n\n<p>so</p>',
     "Do\n\n```py\ndef f(a):\n    return a_b * 2\n```\n\nso", SAME),
    ("code opens with blank lines and indent", "<pre><code>\n\n    a\n\tb  \n</code></pre>",
     "```\n    a\n\tb\n```", "```\n\n\n    a\n\tb  \n```"),
    ("blank lines in code", "<pre><code>a\n\n\n \nb\n</code></pre>", "```\na\n\nb\n```", "```\na\n\n\n \nb\n```"),
    ("entities in code", "<pre><code>if (a &lt; b &amp;&amp; s == &quot;&amp;amp;&quot;)\n</code></pre>",
     '```\nif (a < b && s == "&amp;")\n```', SAME),
    ("fence in code", "<pre><code>```py\nx\n```\n</code></pre>",
     "```\n```py\nx\n```\n```", "````\n```py\nx\n```\n````"),
    ("coloured code", '<pre class="hljs python"><code><span class="k">def</span> f():<br>    pass</code></pre>',
     "```hljs\ndef f():  \n    pass\n```", "```python\ndef f():\n    pass\n```"),
    ("language on the code", '<pre class="prettyprint prettyprinted"><code class="language-c++">x;</code></pre>',
     "```prettyprint\nx;\n```", "```c++\nx;\n```"),
    ("language not first", '<pre class="snippet-code-js lang-js prettyprint-override"><code>x;</code></pre>',
     "```js\nx;\n```", SAME),
    ("language with a hyphen", '<pre class="lang-objective-c s-code-block"><code>x;</code></pre>',
     "```c\nx;\n```", "```objective-c\nx;\n```"),
    ("no language said", '<pre class="lang-none prettyprint-override"><code>x</code></pre>',
     "```none\nx\n```", "```\nx\n```"),
    ("style names only", '<pre class="default s-code-block"><code>x</code></pre>',
     "```default\nx\n```", "```\nx\n```"),
    ("pre alone", "<pre>\n  a\n b</pre>", "```\n  a\n b\n```", SAME),
    ("inline code", "<p>Use <code>a_b  *c*</code> or <code>x &lt; y</code>.</p>",
     "Use `a_b *c*` or `x < y`.", "Use `a_b  *c*` or `x < y`."),
    ("backticks in inline code", "<p>Write <code>`a``b`</code></p>", "Write ``` `a``b` ```", SAME),
    ("keys", "<p>Press <kbd>Ctrl</kbd>+<kbd>C</kbd></p>", "Press `Ctrl`+`C`", "Press <kbd>Ctrl</kbd>+<kbd>C</kbd>"),
    ("sub and sup", "<p>H<sub>2</sub>O, x<sup>n+1</sup></p>", "H2O, xn+1", "H<sub>2</sub>O, x<sup>n+1</sup>"),
    ("link", '<p>See <a href="https://a.b/c_d" title="the &quot;title&quot;" rel="nofollow">the_docs</a>.</p>',
     'See [the\\_docs](https://a.b/c_d "the \\"title\\"").', 'See [the_docs](https://a.b/c_d "the \\"title\\"").'),
    ("bare link", '<p><a href="http://a.b/c_d">http://a.b/c_d</a></p>', "<http://a.b/c_d>", SAME),
    ("link with odd address",
     '<p><a href="/a b">x</a> <a href="http://a.b/c_(d)">y</a> <a href="http://a.b/c)">z</a></p>',
     "[x](/a b) [y](http://a.b/c_(d)) [z](http://a.b/c))", "[x](</a b>) [y](http://a.b/c_(d)) [z](<http://a.b/c)>)"),
    ("link without address", "<p><a name='top'>Top</a> <a href=''>x</a></p>", "Top x", SAME),
    ("image", '<p><img src="https://i.b/1.png" alt="a graph"></p>', "![a graph](https://i.b/1.png)", SAME),
    ("image in a link",
     '<p><a href="https://i.b/1.png"><img src="https://i.b/1s.png" alt="enter image description here"></a></p>',
     "[![enter image description here](https://i.b/1s.png)](https://i.b/1.png)", SAME),
    ("list", "<ul>\n<li>a</li>\n<li>b <em>c</em></li>\n</ul>", "* a\n* b *c*", "- a\n- b *c*"),
    ("nested list", "<ul>\n<li>a\n<ul>\n<li>b</li>\n<li>c</li>\n</ul></li>\n<li>d</li>\n</ul>",
     "* a\n  + b\n  + c\n* d", "- a\n  - b\n  - c\n- d"),
    ("numbers from seven", '<ol start="7">\n<li>a</li>\n<li>b</li>\n</ol>\n<p>c</p>', "7. a\n8. b\n\nc", SAME),
    ("loose list", "<ol>\n<li><p>a</p>\n\n<p>b</p></li>\n<li><p>c</p></li>\n</ol>", "1. a\n\n   b\n2. c", SAME),
    ("code in a list", "<ol>\n<li><p>Run</p>\n\n<pre><code>a\n\n  b\n</code></pre></li>\n<li>Done</li>\n</ol>",
     "1. Run\n\n   ```\n   a\n\n     b\n   ```\n2. Done", SAME),
    ("code as an item", "<ul><li><pre><code>a\nb\n</code></pre></li></ul>",
     "* ```\n  a\n  b\n  ```", "- ```\n  a\n  b\n  ```"),
    ("quote", "<blockquote>\n<p>a</p>\n\n<p>b</p>\n</blockquote>\n<p>c</p>", "> a\n>\n> b\n\nc", SAME),
    ("nested quotes", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote>", "> a\n>\n> > b", SAME),
    ("list and code in a quote",
     "<blockquote><p>a</p><ul><li>b<pre><code>x\n\ny\n</code></pre></li></ul></blockquote>",
     "> a\n>\n> * b\n>\n>   ```\n>   x\n>\n>   y\n>   ```", "> a\n>\n> - b\n>\n>   ```\n>   x\n>\n>   y\n>   ```"),
    ("spoiler", '<blockquote class="spoiler"><p>It was<br>the cat</p></blockquote>',
     "> It was  \n> the cat", ">! It was\n>! the cat"),
    ("table",
     "<div class='s-table-container'><table><thead><tr><th>a</th><th style='text-align:"
     " right;'>b</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table></div>",
     "| a | b |\n| --- | --- |\n| 1 | 2 |", SAME),
    ("pipes in a table", "<table><tr><th>a|b</th></tr><tr><td><code>x || y</code></td></tr></table>",
     "| a|b |\n| --- |\n| `x || y` |", "| a\\|b |\n| --- |\n| `x \\|\\| y` |"),
    ("table without a head",
     "<table><tr><td>a<br>b</td><td><pre><code>x\ny</code></pre></td></tr><tr><td>c</td><td></td></tr></table>",
     "|  |  |\n| --- | --- |\n| a b | ``` x y ``` |\n| c |  |", "| a b | `x y` |\n| --- | --- |\n| c |  |"),
    ("headings", "<h1>a_b</h1>\n<h2>c</h2>\n<h3>d <code>e</code></h3>\n<p>f</p>",
     "a\\_b\n====\n\nc\n-\n\n### d `e`\n\nf", "# a_b\n\n## c\n\n### d `e`\n\nf"),
    ("rule", "<p>a</p>\n<hr>\n<p>b</p>", "a\n\n---\n\nb", SAME),
    ("line breaks", "<p>a<br />\nb<br><br>c  </p>", "a  \nb  \n\nc", "a\nb\n\nc"),
    ("struck out", "<p><s>a</s> <del>b</del> <strike>c</strike></p>", "~~a~~ ~~b~~ c", "~~a~~ ~~b~~ ~~c~~"),
    ("definitions", "<dl><dt>a</dt><dd>b</dd><dt>c</dt><dd><p>d</p><p>e</p></dd></dl>",
     "a\n:   b\n\nc\n:   d\n\n    e", SAME),
    ("many blank lines", "<p>a</p>\n\n\n\n<p>&nbsp;</p><p>b</p>\n\n", "a\n\nb", SAME),
    ("edit note", "<p>a</p>\n\n<hr>\n\n<p><strong>EDIT:</strong> b_c </p>",
     "a\n\n---\n\n**EDIT:** b\\_c", "a\n\n---\n\n**EDIT:** b_c"),
    ("fence as text", "<p>```<br>a</p>", "```  \na", "\\```\na"),
    ("comment, script and instruction", "<!-- language: lang-js --><p>a<script>b()</script><?php c ?>d</p>",
     "aphp c ?d", "ad"),
    ("broken html", "<p>a<b>b<p>c</i></td>", "a**b\n\nc**", SAME),
    ("no markup at all", "2 &gt; 1\n\n\n\nfor a_b", "2 > 1\nfor a\\_b", "2 > 1\nfor a_b"),
    ("nothing", "", "", SAME),
]


@pytest.mark.parametrize("markup, published, clean", [shape[1:] for shape in GOLDEN], ids=[name for name, *_ in GOLDEN])
def test_golden_shapes(markup, published, clean):
    assert STYLES["published"](markup, "html") == published
    assert STYLES["clean"](markup, "html") == (published if clean is SAME else clean)


def notebook(markup: str) -> str:
    """What the published notebook calls, word for word what it does, with nothing of ours."""
    def language(el):
        named = el["class"][0] if el.has_attr("class") else None
        return named if named is None else named.split("-")[-1]
    text = re.sub(r"\n\s*\n", "\n\n", markdownify(markup, code_language_callback=language)).strip()
    return text.encode("utf-8", "replace").decode()


PIECES = [*"a_*`<>&\n\n \t\\", "&lt;", "&amp;", "&#9;", "\xa0", "1. ", "- ", "$x_i$", "<br>", "<hr/>", "<!-- c -->",
          "<img src=u alt='a_b'>", "<a href='u_v'>", "<ol start=3>", "<pre class='lang-py x'>", "<td colspan=2>"]
PIECES += [f"<{slash}{tag}>" for slash in ("", "/") for tag in (
    "p", "b", "em", "code", "pre", "ul", "ol", "li", "blockquote", "table", "tr", "td", "th", "thead", "tbody", "h1",
    "h3", "a", "kbd", "sub", "dl", "dt", "dd", "div", "s", "script", "q", "samp", "figure", "caption")]


def soups(number: int) -> list[str]:
    drawn = random.Random(0)
    return ["".join(drawn.choices(PIECES, k=drawn.randrange(1, 60))) for _ in range(number)]


@pytest.mark.filterwarnings("ignore")
def test_published_is_the_notebooks_call_byte_for_byte():
    odd = ["<p>\ud800a", "http://a.b/c_d", "<?xml version='1'?><a>b</a>", "<p>a<b"]
    for markup in [shape[1] for shape in GOLDEN] + soups(2000) + odd:
        assert STYLES["published"](markup, "html") == notebook(markup), markup


@pytest.mark.skipif(not POSTS.exists(), reason=f"real posts are not here: {POSTS}")
def test_published_is_the_notebooks_call_on_real_posts():
    bodies = [row.get("Body") for row in etree.parse(POSTS).getroot() if row.get("Body")]
    assert len(bodies) > 500
    for body in bodies:
        assert STYLES["published"](body, "html") == notebook(body)
        assert STYLES["clean"](body, "html")


def test_quick_searches_find_what_stock_ones_do():
    for markup in soups(200):
        quick = BeautifulSoup(markup, "html.parser", element_classes={Tag: bounds.FastTag})
        for el in quick.find_all(True):
            assert el.find_parent("li") is Tag.find_parent(el, "li")
            assert el.find_previous_siblings("b") == Tag.find_previous_siblings(el, "b")
            assert el.find_all(["td", "th"]) == Tag.find_all(el, ["td", "th"])
            assert el.find_all("p") == Tag.find_all(el, "p")
            assert el.find_all("a", attrs={"href": True}) == Tag.find_all(el, "a", attrs={"href": True})


CODE = ["a", "b_c", " ", "    ", "\t", "\n", "\n\n\n", "`", "```", "````py", "~~~", "*", "#", "> ", "- ", "<p>", "|",
        "&amp;", "\\", "\xa0", "\x0b", "\u2028", "é", "1. "]
AROUND = [  # HTML before and after, and what every line of code then stands behind
    ("", "", ""), ("<p>a</p>", "<p>b</p>", ""), ("<ul><li>a", "b</li></ul>", "  "), ("<dl><dd>a", "</dd></dl>", "    "),
    ("<blockquote>", "</blockquote>", "> "), ("<ol start=10><li><p>a</p>", "</li></ol>", "    "),
    ("<ol><li><blockquote>a", "</blockquote></li></ol>", "   > "), ("<blockquote><ul><li>", "</li></ul>b", ">   ")]


def fenced(markdown: str, indent: str) -> str:
    """The code of the first block, read as a reader of Markdown does."""
    lines = iter(markdown.split("\n"))
    fence = next(match[1] for line in lines if (match := re.match(r"[ >:0-9.-]*(`{3,})$", line)))
    code = []
    while (line := next(lines)) != indent + fence:
        assert line.startswith(indent.rstrip() if line == indent.rstrip() else indent)
        code.append(line[len(indent):])
    return "\n".join(code)


@pytest.mark.parametrize("before, after, indent", AROUND)
def test_code_comes_back_as_it_was(before, after, indent):
    drawn = random.Random(1)
    for _ in range(250):
        code = "".join(drawn.choices(CODE, k=drawn.randrange(1, 30))) + drawn.choice(["x", "x\n", "x\n\n"])
        markup = f"{before}<pre><code>{entities.escape(code)}\n</code></pre>{after}"
        assert fenced(STYLES["clean"](markup, "html"), indent) == code


def test_inline_code_comes_back_as_it_was():
    drawn = random.Random(2)
    for _ in range(1000):
        code = "".join(drawn.choices([c for c in CODE if "\n" not in c], k=drawn.randrange(1, 12))) + "x"
        code = drawn.choice([code, code[::-1], code + "`", code + " "])
        markdown = STYLES["clean"](f"<p>a <code>{entities.escape(code)}</code> b</p>", "html")
        ticks, inside = re.fullmatch(r"a (`+)(.*[^`])\1 b", markdown, re.DOTALL).groups()
        assert ticks not in re.findall("`+", inside)
        assert (inside[1:-1] if inside[0] == inside[-1] == " " else inside) == code


@pytest.mark.parametrize("markup", ["<b>a<pre>x\n\n\n  y</pre>c</b>", "<dt>a <pre>x\n\n\n  y</pre> <pre>z</pre></dt>",
                                    "<a href=u><pre>x\n\n\n  y</pre></a>", "<p>\x000\x00</p><pre>x\n\n\n  y</pre>"])
def test_code_in_odd_places_stays_whole(markup):
    markdown = STYLES["clean"](markup, "html")
    assert "\n```\nx\n\n\n  y\n```\n" in f"\n{markdown}\n"
    assert "\0" not in markdown and markdown.count("x\n") == 1


def test_no_blanks_outside_code():
    for markup in soups(2000):
        try:
            markdown = STYLES["clean"](re.sub("</?(pre|code|samp).*?>", "", markup), "html")
        except NotConvertedError as error:
            pytest.fail(f"{error}: {markup}")
        assert not re.search(r"[ \t]$|\n\n\n", markdown, re.MULTILINE) and markdown == markdown.strip()


def test_markdown_passes_and_styles_are_two():
    for convert in STYLES.values():
        assert convert("a *b* <c>\r\n\n\n\n d ", "markdown") == "a *b* <c>\r\n\n\n\n d "
    with pytest.raises(ValueError, match="none of published, clean"):
        make_converter("cleaned")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("limits, most, over, reason", [
    ({"MAX_CHARACTERS": 40}, "x" * 40, "x" * 41, "too long"),
    ({"MAX_CHARACTERS": 60}, "<ul><li>a<li>b</ul>", "<ol start=123456789><li>" + "a<br>" * 6, "too long"),
    ({"MAX_TAGS": 4}, "<b>a</b><hr><hr>", "<b>a</b><hr><hr><hr>", "too many tags"),
    ({"MAX_DEPTH": 9}, "<div>" * 9 + "x", "<div>" * 10 + "x", "nested too deeply"),
    ({"MAX_BLANKS": 9}, "a" + " " * 9 + "b", "a" + " " * 5 + "&#32;<b>    c</b>", "too much white space"),
    ({}, "<ol start=123456789><li>x", "<ol start=1234567890><li>x", "list starts at an absurd number"),
    ({"MAX_CHARACTERS": 200}, "<u>" * 9 + "x" * 100, "<u>" * 33 + "x" * 100, "too much nested text"),
    ({}, "<soups>x", "<soup>x", r"markdownify fails \(TypeError\)")])
def test_caps(style, limits, most, over, reason, monkeypatch):
    for name, value in limits.items():
        monkeypatch.setattr(bounds, name, value)
    convert = make_converter(style)
    assert convert(most, "html")
    with pytest.raises(NotConvertedError, match=f"^{reason}$"):
        convert(over, "html")
    assert convert("<p>after", "html") == "after"


def test_deep_enough_whoever_calls():
    """The same post must not pass in one caller and overflow the stack of another."""
    def called_from(depth, convert):
        return convert("<div>" * 99 + "x", "html") if not depth else called_from(depth - 1, convert)
    for convert in STYLES.values():
        assert called_from(0, convert) == called_from(300, convert) == "x"


HOSTILE = {
    "400 nested divs": "<div>" * 400 + "x" + "</div>" * 400, "unclosed paragraphs": "<p>x" * 4900,
    "8000 items": "<ol>" + "<li>x</li>" * 8000 + "</ol>", "a megabyte of <": "<" * 1_000_000,
    "blanks": "<p>a" + " " * 190_000 + "b", "blanks as entities": "<p>a" + "&#32;" * 38_000 + "b",
    "blanks in a script": "<script>a" + " " * 190_000 + "b</script>", "blanks in <?": "<?a" + " " * 190_000 + "b>",
    "blanks in CDATA": "<![CDATA[a" + " " * 190_000 + "b]]>", "colspans": "<tr><td colspan=1000>x</td></tr>" * 1000,
    "growing": "<blockquote>" * 99 + "<br>x" * 2300, "start": f"<ol start='{'9' * 5000}'><li>x",
    "wide start": f"<ol start='{'9' * 4000}'><li><pre>" + "a\n" * 90_000, "a long number": "&#" + "9" * 190_000 + ";",
    "lines in quotes": "<blockquote>" * 98 + "<pre>" + "a\n" * 95_000,
    "blank lines in items": "<ul><li>" * 49 + "<pre>x" + ("a" + "\n" * 999) * 190,
    "nested rows": "<tr>" * 98 + "<td></td>" * 2300, "<a": "<a" * 4999, "</a": "</a" * 4999, "<!--": "<!--" * 4999,
    "<![CDATA[": "<![CDATA[" * 4999, "tags without end": ("<a " + "x " * 18) * 4999,
    "tags that end in quotes": ("<a x='>' " + "y " * 180) * 499, "comments without end": ("<!--" + "-" * 36) * 4999,
    "alt in items": "<li>" * 98 + "<img src=x alt='" + ("a" + "\n" * 999) * 190 + "'>", "h999": f"<h{'9' * 5000}>x"}
ODD = {
    "<": "<" * 4999, "<a ": "<a " * 400, "<!DOCTYPE": "<!DOCTYPE a [" * 400, "<?": "<?" * 400,
    "<!a": "<!" + "a" * 9999, "]]>": "]]>" * 66_000, "&": "&" * 199_999, "&amp;": "&amp;" * 39_999,
    "&#0;": "&#0;" * 40_000, "NUL": "\0" * 199_999, "surrogates": "\ud800" * 199_999, "links": "<a href=x>x</a>" * 2499,
    "bold": "<b>x</b>" * 2499, "attributes": "<a " + "x=y " * 49_000 + ">z</a>",
    "attributes, open": "<a " + "x='" * 60_000,
    "attribute": "<img src=x alt='a" + " \n" * 95_000 + "b'>",
    "classes": "<pre class='" + "a-b " * 49_000 + "'>x</pre>",
    "items": "<ol>" + "<li>x</li>" * 2490 + "</ol>", "head": "<thead>" + "<tr><td></td></tr>" * 1240,
    "bodies": "<table>" + "<tbody><tr></tr></tbody>" * 1240, "nested tables": "<table><tr><td>" * 33 + "x|" * 500,
    "colspan": "<td colspan=1000000>x",
    "ticks": "<code>" + "` " * 95_000,
    "code blocks": "<li>" * 2 + "<pre>x\n\n\ny</pre>" * 2400, "runs": "<p>" + (" " * 999 + "x") * 199,
    "start": "<ol start=x><li>y", "nothing in them": "<a href>x</a><img><img src><pre class=x></pre><td><li>"}


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("markup", HOSTILE.values(), ids=HOSTILE)
def test_hostile_posts_cost_little_and_are_dropped(markup, style):
    start = time.process_time()
    with pytest.raises(NotConvertedError):
        STYLES[style](markup, "html")
    assert time.process_time() - start < 5


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("markup", ODD.values(), ids=ODD)
def test_odd_posts_cost_little_and_are_text(markup, style):
    start = time.process_time()
    STYLES[style](markup, "html").encode()
    assert time.process_time() - start < 5


@pytest.mark.parametrize("style", STYLES)
def test_memory_is_bounded(style):
    for name in ("wide start", "lines in quotes", "colspans", "growing"):
        tracemalloc.start()
        with pytest.raises(NotConvertedError):
            STYLES[style](HOSTILE[name], "html")
        assert tracemalloc.get_traced_memory()[1] < 60e6
        tracemalloc.stop()


def test_invented_tags_are_forgotten():
    stock = bounds.BoundedConverter()
    for post in range(30):
        stock.convert("".join(f"<a{post}-{tag}></a{post}-{tag}>" for tag in range(90)))
    assert len(stock.convert_fn_cache) < 1200
