"""Scores, pairs, splits, Markdown, sorted runs: the parts, against plain loops."""

import math
import time
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from stages.text import runs
from stages.text.markdown import MAX_CHARACTERS, NotConvertedError, markdown_of
from stages.text.pairing import pairs_of, split_of
from stages.text.scoring import answer_score

SHARES = {"finetune": 3.0, "reward": 3.0, "rl": 3.0, "evaluation": 1.8}


@pytest.mark.parametrize("votes, score", [(0, 0), (1, 1), (2, 2), (3, 2), (7, 3), (10, 3), (-5, -1), (-1, -1)])
def test_score_table(votes, score):
    assert answer_score(votes, False) == score
    assert answer_score(votes, True) == (score + 1 if votes >= 0 else -1)


def test_score_is_the_rounded_logarithm():
    assert all(answer_score(votes, False) == round(math.log2(1 + votes)) for votes in range(50_000))


def test_all_pairs_when_they_are_few():
    for scores in ([], [1], [2, 2], [0, 3, 1, 3], [5, -1, 0, 2, 2], [1, 0]):
        expected = {(j, k) for j in range(len(scores)) for k in range(len(scores)) if scores[j] > scores[k]}
        drawn = pairs_of(scores, 10, 42, "site", 1)
        assert len(drawn) == len(expected) and set(drawn) == expected


def test_drawn_pairs_are_evenly_spread_and_never_repeat():
    scores = [0, 1, 1, 2, 5, 5, -1]
    possible = [(j, k) for j in range(7) for k in range(7) if scores[j] > scores[k]]
    seen = Counter()
    for question in range(4000):
        drawn = pairs_of(scores, 5, 42, "site", question)
        assert len(set(drawn)) == 5
        seen.update(drawn)
    assert set(seen) == set(possible)
    share = 4000 * 5 / len(possible)
    assert all(abs(count - share) < 5 * math.sqrt(share) for count in seen.values())


def test_the_draw_depends_on_seed_site_and_question_and_on_nothing_else():
    scores = list(range(30))
    drawn = pairs_of(scores, 10, 42, "a", 1)
    assert drawn == pairs_of(scores, 10, 42, "a", 1) == [  # as any process on any machine must draw them
        (29, 27), (26, 3), (25, 22), (25, 9), (25, 8), (21, 2), (20, 16), (16, 13), (13, 10), (7, 0)]
    assert all(drawn != pairs_of(scores, 10, *other) for other in [(43, "a", 1), (42, "b", 1), (42, "a", 2)])


def test_ten_thousand_answers():
    start = time.perf_counter()
    drawn = pairs_of([i % 50 for i in range(10_000)], 10, 42, "site", 1)
    assert len(drawn) == 10 and all(j % 50 > k % 50 for j, k in drawn)
    assert time.perf_counter() - start < 1


def test_splits_have_their_shares_and_need_no_order():
    found = Counter(split_of("site", number, SHARES, 42) for number in range(20_000))
    for name, share in SHARES.items():
        assert abs(found[name] / 20_000 - share / 10.8) < 0.02
    assert "rl" not in {split_of("site", number, SHARES | {"rl": 0.0}, 42) for number in range(1000)}
    moved = [sum(split_of(*a) != split_of(*b) for a, b in zip(one, other, strict=True)) for one, other in (
        ([("site", n, SHARES, 42) for n in range(999)], [("site", n, SHARES, 43) for n in range(999)]),
        ([("site", n, SHARES, 42) for n in range(999)], [("other", n, SHARES, 42) for n in range(999)]))]
    assert min(moved) > 500


CODE = "def f(a):\n    if a < b && c:\n\n        return my_var * 2  # *x* &amp;\n\n\tend"


def test_code_stays_as_it_is():
    escaped = CODE.replace("&", "&amp;").replace("<", "&lt;")
    html = f'<p>Do</p>\n\n<pre class="lang-py prettyprint-override"><code>{escaped}\n</code></pre>\n\n<p>so</p>'
    assert markdown_of(html, "html") == f"Do\n\n```py\n{CODE}\n```\n\nso"


@pytest.mark.parametrize("classes, language", [
    ("lang-py prettyprint-override", "py"), ("language-c++", "c++"), ("snippet-code-js lang-js", "js"),
    ("python", "python"), ("lang-objective-c", "objective-c"), ("prettyprint", ""), ("lang-none", ""),
    ("a`b", ""), ("", "")])
def test_language_of_code(classes, language):
    assert markdown_of(f'<pre class="{classes}"><code>x</code></pre>', "html") == f"```{language}\nx\n```"


def test_blank_lines_collapse_and_markdown_passes():
    assert markdown_of("<p>a</p>\n\n\n<pre><code>b\n\n \n\nc</code></pre>", "html") == "a\n\n```\nb\n\nc\n```"
    assert markdown_of("a *b* <c>\n\n\n\nd", "markdown") == "a *b* <c>\n\n\n\nd"
    assert markdown_of('<a href="u">t</a> <em>e</em> &lt;i&gt; &amp;amp;', "html") == "[t](u) *e* <i> &amp;"


HOSTILE = {
    "400 nested divs": "<div>" * 400 + "x" + "</div>" * 400,
    "unclosed": "<p>x" * 4900,
    "8000 items": "<ol>" + "<li>x</li>" * 8000 + "</ol>",
    "a megabyte of <": "<" * 1_000_000,
    "blanks": "<p>a" + " " * 190_000 + "b</p>",
    "blanks as entities": "<p>a" + "&#32;" * 38_000 + "b</p>",
    "colspan": "<table>" + "<tr><td colspan=1000>x</td></tr>" * 1000 + "</table>",
    "growing": "<blockquote>" * 99 + "<br>x" * 2300 + "</blockquote>" * 99,
    "start": f"<ol start='{'9' * 5000}'><li>x</li></ol>",
}


@pytest.mark.parametrize("html", HOSTILE.values(), ids=HOSTILE)
def test_hostile_posts_cost_little_and_are_dropped(html):
    start = time.perf_counter()
    with pytest.raises(NotConvertedError):
        markdown_of(html, "html")
    assert time.perf_counter() - start < 3


@pytest.mark.parametrize("html", [
    "<" * 4999, "<a" * 4999, "<!--" * 4999, "<![CDATA[" * 4999, "<?" * 4999, "</a" * 4999, "<!" + "a" * 9999,
    "&" * 99_999, "<td>", "<li>", "<ol start=x><li>y", "\0", "<pre>", "", "http://a.b", "<a href>x</a>"])
def test_odd_posts_cost_little_and_are_text(html):
    start = time.perf_counter()
    assert isinstance(markdown_of(html, "html"), str)
    assert time.perf_counter() - start < 3


def test_deep_enough_whoever_calls():
    """The same post must not pass in one caller and overflow the stack of another."""
    def called_from(depth):
        return markdown_of("<div>" * 99 + "x", "html") if not depth else called_from(depth - 1)
    assert called_from(0) == called_from(300) == "x"


def test_text_over_the_cap_is_dropped():
    with pytest.raises(NotConvertedError, match="too long"):
        markdown_of("x" * (MAX_CHARACTERS + 1), "markdown")


def test_sorted_runs_against_sorted(tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "RUN_BYTES", 30_000)
    monkeypatch.setattr(runs, "RANGE_BYTES", 10_000)
    monkeypatch.setattr(runs, "MARK_BYTES", 1000)
    generator = np.random.default_rng(0)
    rows = [(int(key), number, f"text {number}") for number, key in enumerate(generator.integers(-50, 200, 3000))]
    schema = pa.schema([("key", pa.int64()), ("n", pa.int64()), ("t", pa.string())])
    taken = runs.Runs(tmp_path / "runs", schema, ["key", "n"])
    for row in rows:
        taken.add(row, size=len(row[2]))
    tables = list(taken.ranges())
    assert [tuple(r.values()) for table in tables for r in table.to_pylist()] == sorted(rows)
    assert len(taken.paths) > 10 and len(tables) > 20
    assert max(len(table) for table in tables) < 10 * 3000 / len(tables)
    keys = [set(table["key"].to_pylist()) for table in tables]
    assert sum(map(len, keys)) == len(set().union(*keys))


def test_no_rows_no_ranges(tmp_path):
    assert list(runs.Runs(tmp_path / "runs", pa.schema([("key", pa.int64())]), ["key"]).ranges()) == []
