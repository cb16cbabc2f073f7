"""Compare the parser's tree of a post with html.parser's: elements, strings, attributes and links between them."""

import random

import pytest
from bs4 import BeautifulSoup
from lxml import etree

from stages.stackexchange.markdown import limits
from tests.helpers import stackexchange_dumps
from tests.stackexchange.test_markdown import GOLDEN

pytestmark = pytest.mark.filterwarnings("ignore")
PLAIN = ["x", " ", "\n", "  \n", "\r\n", "é", ">", '"', "\x00", "&lt;", "&amp;", "&#39;", "&nbsp;", "<br>", "<br/>",
         "<br />", "<hr>", '<img src="a" alt="b&amp;c">', '<img src="a" />', '<a href="u" title="t &lt; &eacute;">',
         '<a href="1" href="2">', '<pre class="a b">', '<td colspan="3" class="">', "<td>", "</td>", "<p>", "</p>",
         "<pre>", "</pre>", "<code>", "</code>", "<ul>", "</ul>", "<li>", "</li>", "<a>", "</a>", "<table>", "</table>",
         "<tr>", "</tr>", "<div>", "</div>", "<s>", "</s>"]
OTHER = ["&", "& ", "&eacute;", "&lt", "&#60;", "&amp", "<", "<p", "<P>", "<p >", "<p/>", "</br>", "</ p>",
         "<!-- c -->", "<!-- ", "<script>", "<textarea>",
         "<title>", "</x>", "<x>", "<p class='a'>", "<p class=a>", '<p class="a"id="b">',
         '<a href="a>b">', "<![CDATA[x]]>", "<?xml?>", "<!DOCTYPE html>"]


def posts(pieces: list[str], number: int) -> list[str]:
    drawn = random.Random(0)
    return ["".join(drawn.choices(pieces, k=drawn.randint(1, 14))) for _ in range(number)]


def tree(markup: str) -> BeautifulSoup:
    return BeautifulSoup(markup, builder=limits.PostBuilder(store_line_numbers=False))


def shape(soup: BeautifulSoup) -> list[tuple]:
    for element in soup.descendants:
        assert element.next_element is None or element.next_element.previous_element is element
    return [(type(e), e.parent.name, e.next_sibling is None,
             (e.name, e.attrs, e.can_be_empty_element) if e.name else str(e)) for e in soup.descendants]


def check_alike(markups: list[str]) -> int:
    """How many of them were plain."""
    for markup in markups:
        assert shape(tree(markup)) == shape(BeautifulSoup(markup, "html.parser")), markup
    return sum(limits._tokenize(markup) is not None for markup in markups)


def test_plain_posts_have_the_tree_of_html_parser():
    assert check_alike(posts(PLAIN, 4000)) == 4000


def test_a_post_that_is_not_plain_goes_to_html_parser():
    mixed = posts(PLAIN + OTHER, 4000)
    assert 200 < check_alike(mixed) < 2000
    assert check_alike([f"<p>{piece}" for piece in OTHER]) == 0


def test_golden_shapes():
    assert check_alike([markup for _, markup, *_ in GOLDEN]) > 20


def test_real_posts():
    """Nearly all of them are plain, or this would be no faster."""
    dump = stackexchange_dumps.real_dump("coffee.stackexchange.com") / "Posts.xml"
    bodies = [row.get("Body") for row in etree.parse(dump).getroot()]
    assert check_alike(list(filter(None, bodies))) > 0.95 * len(bodies) > 500
