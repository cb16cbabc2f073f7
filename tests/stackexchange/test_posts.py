"""Test posts: real, odd and broken dumps to questions with scored answers."""

import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages.recipe.sections.data import Posts
from stages.stackexchange.dump import xml_table
from tests.helpers import stackexchange_dumps
from tests.helpers.stackexchange_dumps import (
    answer,
    document,
    make_posts,
    posts_from_rows,
    qa_rows,
    question,
    row,
    write_dump,
)

STRICT = Posts()


def quarantine(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "posts/quarantine.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("name, questions, answers", [
    ("beer.stackexchange.com.7z", 1029, 2277), ("coffee.stackexchange.com", 225, 327), ("economics-2012", 411, 525),
    ("matheducators.stackexchange.com.7z", 397, 1507), ("ai.stackexchange.com.7z", 604, 1004),
    ("quantumcomputing.stackexchange.com.7z", 612, 1060), ("startups.stackexchange.com.7z", 3014, 5358)])
def test_real_dump_counts(tmp_path, name, questions, answers):
    """README.md of the real dumps states all questions and all answers of each."""
    metrics, _ = make_posts(tmp_path / "posts", str(stackexchange_dumps.real_dump(name)), config=STRICT)
    dropped = metrics["dropped"]
    assert metrics["questions"] + metrics["dropped_questions"]["too few answers"] == questions
    assert metrics["questions"] + metrics["answers"] + dropped["too few answers"] == questions + answers
    assert metrics["rows_set_aside"] == 0


def test_a_folder_of_sites(tmp_path):
    metrics, records = make_posts(tmp_path / "posts", str(stackexchange_dumps.real_dump()), config=STRICT)
    assert len(metrics["sites"]) == 8
    assert [(r["site"], r["question_id"]) for r in records] == sorted((r["site"], r["question_id"]) for r in records)


def test_record(tmp_path):
    asked_question = question(10, AcceptedAnswerId=12, Tags="<a><b-c>", ContentLicense="CC BY-SA 9")
    answers = answer(12, 10, 7, OwnerDisplayName="Ann & Bob") + answer(11, 10, -3)
    _, [record] = posts_from_rows(tmp_path, answers, row(Id=1, PostTypeId=4, Score=0), asked_question)
    user, later = "https://site.test/users/", {
        "license": "CC BY-SA 4.0", "accepted": False, "date": "2020-01-02T00:00:00.000"}
    assert record == {
        "question_id": 10, "site": "site.test", "title": "title 10", "question": "<p>question 10</p>", "markup": "html",
        "tags": ["a", "b-c"], "date": "2020-01-01T00:00:00.000", "url": "https://site.test/questions/10",
        "author": "user 7", "author_url": f"{user}7", "license": "CC BY-SA 9", "answers": [
            later | {"id": 11, "text": "<p>answer 11</p>", "author": "user 8", "author_url": f"{user}8", "votes": -3,
                     "score": -1},
            later | {"id": 12, "text": "<p>answer 12</p>", "author": "Ann & Bob", "author_url": f"{user}8", "votes": 7,
                     "accepted": True, "score": 4}]}


@pytest.mark.parametrize("day, license", [
    ("2011-04-07", "2.5"), ("2011-04-08", "3.0"), ("2018-05-01", "3.0"), ("2018-05-02", "4.0")])
def test_the_license_of_the_day_where_a_row_does_not_say(tmp_path, day, license):
    rows = [question(1, CreationDate=day), answer(2, 1, CreationDate="2012-01-01"), answer(3, 1, ContentLicense="")]
    _, [record] = posts_from_rows(tmp_path, *rows)
    assert [record["license"], *(a["license"] for a in record["answers"])] == [
        f"CC BY-SA {version}" for version in (license, "3.0", "4.0")]


@pytest.mark.parametrize("tags, expected", [("<a><b>", ["a", "b"]), ("|a|b|", ["a", "b"]), ("", [])])
def test_tags(tmp_path, tags, expected):
    _, records = posts_from_rows(tmp_path, qa_rows(), question(9, Tags=tags), answer(8, 9), answer(7, 9))
    assert records[1]["tags"] == expected


@pytest.mark.parametrize("date, name", [("2011-04-07", "CC BY-SA 2.5"), ("2011-04-08", "CC BY-SA 3.0"),
                                        ("2018-05-02", "CC BY-SA 4.0"), ("2018-05-02T00:00:00.000", "CC BY-SA 4.0"),
                                        ("zzz", "unknown"), ("", "unknown"), ("2018-13-02", "unknown"),
                                        ("12 May 2018", "unknown")])
def test_license_of_dumps_that_do_not_say(tmp_path, date, name):
    _, records = posts_from_rows(tmp_path, question(1, CreationDate=date), answer(2, 1), answer(3, 1))
    assert records[0]["license"] == name


def test_text_is_unescaped_exactly_once(tmp_path):
    body = "<p>AT&T &amp; &lt;b&gt; \"q\" 'q' é 😀\n\ttab</p>"
    raw = document(qa_rows(), question(10, Body=body), answer(11, 10, Body=body), answer(12, 10))
    assert b"AT&amp;T &amp;amp; &amp;lt;b" in raw
    _, records = make_posts(tmp_path / "posts", write_dump(tmp_path, raw.replace(b"\ttab", b"&#x9;tab")))
    assert records[1]["question"] == records[1]["answers"][0]["text"] == body


@pytest.mark.parametrize("change", [
    lambda raw: b"\xef\xbb\xbf" + raw,
    lambda raw: raw.replace(b"\n", b"\r\n"),
    lambda raw: raw.replace(b'"', b"'"),
    lambda raw: raw.replace(b" />\n", b"/>"),
    lambda raw: raw.replace(b' Score="', b'\n\t Score = "'),
    lambda raw: raw.replace(b" />", b"></row>"),
    lambda raw: raw.replace(b"<posts>", b"<!-- a -->\n<?pi?><posts >"),
    lambda raw: raw.replace(b"  <row", b"  <!-- a comment > -->\n<row", 1),
    lambda raw: raw.replace(b"</posts>\n", b"</posts>"),
    lambda raw: b"\n".join([*raw.split(b"\n")[:2], *reversed(raw.split(b"\n")[2:-2]), b"</posts>"]),
], ids=["bom", "crlf", "single quotes", "one line", "rows over lines", "end tags", "comments", "first comment",
        "no newline", "reversed"])
@pytest.mark.parametrize("block_bytes", [1 << 20, 50])
def test_spellings_of_one_dump(tmp_path, monkeypatch, change, block_bytes):
    monkeypatch.setattr(xml_table, "BLOCK_BYTES", block_bytes)
    monkeypatch.setattr(xml_table, "HEAD_BYTES", 100)
    raw = document(*(qa_rows(number) for number in range(1, 40, 3)))
    _, expected = make_posts(tmp_path / "a", write_dump(tmp_path, raw))
    assert len(expected) == 13
    assert make_posts(tmp_path / "b", write_dump(tmp_path, change(raw)), config=STRICT)[1] == expected


def test_names_in_lower_case_and_empty_attributes(tmp_path):
    rows = [question(1, LastEditorDisplayName="", OwnerUserId="", AcceptedAnswerId=""), answer(2, 1),
            answer(3, 1, OwnerDisplayName="")]
    path = write_dump(tmp_path, document(*rows), name="old.site/posts.xml")
    _, [record] = make_posts(tmp_path / "posts", str(tmp_path / "old.site"))
    assert (record["site"], record["author"], record["answers"][1]["author"]) == ("old.site", "unknown", "user 8")
    assert make_posts(tmp_path / "again", path)[1] == [record]


BAD_ROWS = {
    "invalid UTF-8": (question(50).encode().replace(b"question 50", b"\xff\xfe"), None),
    "control character": (question(50).encode().replace(b"question 50", b"a\x01"), None),
    "control reference": (question(50).encode().replace(b"question 50", b"a&#x1;"), None),
    "surrogate reference": (question(50).encode().replace(b"question 50", b"a&#xD800;"), None),
    "unknown entity": (question(50).encode().replace(b"question 50", b"&bomb;"), "bomb"),
    "Id missing": (row(PostTypeId=1, Score=1).encode(), "no Id"),
    "Id a word": (question("x").encode(), "Id is 'x'"),
    "Id as Python writes": (question("1_0").encode(), "Id is '1_0'"),
    "Id too big": (question(10**30).encode(), "Id is"),
    "Score missing": (row(Id=50, PostTypeId=1).encode(), "no Score"),
    "Score a fraction": (question(50, Score="1.5").encode(), "Score is '1.5'"),
    "ParentId missing": (row(Id=50, PostTypeId=2, Score=1).encode(), "no ParentId"),
    "an element inside": (b'<row Id="50" PostTypeId="1" Score="1"><b/></row>\n', "something other"),
    "a namespace prefix": (question(50).encode().replace(b"<row", b"<x:row"), "a row with a namespace prefix"),
    "no end": (b'<row Id="50" PostTypeId="1" Score="1">\n', None),
    "too long": (question(50, Body="x" * 5000).encode(), "over 2000 bytes"),
    "much too long": (question(50, Body="x" * 300_000).encode(), "over 2000 bytes"),
}


@pytest.mark.parametrize("bad, reason", BAD_ROWS.values(), ids=BAD_ROWS)
@pytest.mark.parametrize("last", [False, True])
def test_one_bad_row_is_set_aside(tmp_path, monkeypatch, bad, reason, last):
    monkeypatch.setattr(xml_table, "BLOCK_BYTES", 10_000)
    monkeypatch.setattr(xml_table, "HEAD_BYTES", 400)
    before, after = qa_rows(1).encode(), b"" if last else qa_rows(20).encode()
    raw = document().replace(b"</posts>", before + bad + after + b"</posts>")
    config = Posts(max_bad_rows_share=0.2 if not last else 0.3, max_row_bytes=2000)
    metrics, records = make_posts(tmp_path / "posts", write_dump(tmp_path, raw), config=config)
    assert [r["question_id"] for r in records] == ([1] if last else [1, 20])
    [aside] = quarantine(tmp_path)
    assert metrics["rows_set_aside"] == 1 and aside["line"] == 6
    assert (reason or "") in aside["reason"] and aside["reason"]
    if b' Id="50"' in bad:
        assert aside["id"] == "50"


def test_places_of_bad_rows_and_no_more_in_memory_than_a_row_may_have(tmp_path, monkeypatch):
    monkeypatch.setattr(xml_table, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(xml_table, "HEAD_BYTES", 400)
    sizes, parse_block = [], xml_table._parse_block
    monkeypatch.setattr(xml_table, "_parse_block",
                        lambda block, *rest: sizes.append(len(block)) or parse_block(block, *rest))
    long = question(50).replace("question 50", "x\n" * 50_000)
    raw = document(qa_rows(1), long, qa_rows(10), question("y"), question(60), long.replace("50", "51"))
    raw = raw.replace(b"question 60", b"&#x1;")
    make_posts(tmp_path / "posts", write_dump(tmp_path, raw), config=Posts(max_bad_rows_share=0.5, max_row_bytes=2000))
    aside = quarantine(tmp_path)
    assert [a["line"] for a in aside] == [6, 50_010, 50_011, 50_012]
    lines = raw.splitlines(keepends=True)
    for record in aside:
        assert record["offset"] == sum(map(len, lines[:record["line"] - 1])) + 2
    assert max(sizes) < 8000


def test_a_row_in_a_comment_is_no_row(tmp_path):
    metrics, records = posts_from_rows(tmp_path, qa_rows(1), qa_rows(10), "<!-- " + question(20) + "-->\n", qa_rows(30))
    assert [r["question_id"] for r in records] == [1, 30]  # 10 lost the answer that the comment begins behind
    assert metrics["rows_set_aside"] == 2


def test_a_row_that_libxml2_would_refuse_for_its_size_is_read(tmp_path):
    body = "<p>" + "x" * 12_000_000
    _, records = posts_from_rows(tmp_path, qa_rows(), question(9, Body=body), answer(8, 9), answer(7, 9))
    assert records[1]["question"] == body


def test_too_many_bad_rows_stop_the_stage(tmp_path):
    with pytest.raises(ValueError, match=r"1 of 4 rows cannot be read.*max_bad_rows_share"):
        posts_from_rows(tmp_path, qa_rows(), question("x"), config=Posts(max_bad_rows_share=0.2))


def test_identical_rows_count_once_and_different_ones_are_refused(tmp_path):
    metrics, [record] = posts_from_rows(tmp_path / "same", qa_rows(), answer(2, 1, 5), question(1))
    assert len(record["answers"]) == 2 and metrics["dropped"] == {"identical copies of a row": 2}
    for number, other in enumerate([answer(2, 1, 6), answer(2, 77, 5), question(2), answer(1, 1), answer(1, 3)]):
        with pytest.raises(ValueError, match=r"two different rows have Id [12]: lines [34] and 6"):
            posts_from_rows(tmp_path / str(number), qa_rows(), other)


def test_reasons_for_dropping(tmp_path):
    foreign = question(50, AcceptedAnswerId=2) + answer(51, 50) + answer(52, 50)
    metrics, records = posts_from_rows(tmp_path, qa_rows(1), question(10), answer(11, 10), question(20),
                                       answer(30, 999), row(Id=40, PostTypeId=5, Score=0), foreign)
    assert [r["question_id"] for r in records] == [1, 50] and not any(a["accepted"] for a in records[1]["answers"])
    assert metrics["dropped"] == {"too few answers": 3, "answers without their question": 1, "other post types": 1}
    assert metrics["dropped_questions"] == {"too few answers": 2}
    assert metrics["accepted_answers_not_in_the_file"] == 1


def test_min_answers(tmp_path):
    assert len(posts_from_rows(tmp_path, qa_rows(1), question(10), answer(11, 10), config=Posts(min_answers=1))[1]) == 2


BOMB = b'<!DOCTYPE posts [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;">]>'
NO_DUMP = {
    "empty": (b"", "it is empty"),
    "HTML": (b"<!DOCTYPE html><html><body>404</body></html>", "looks like an HTML page"),
    "another table": (b'<?xml version="1.0"?>\n<votes>\n<row Id="1"/></votes>', "root element is <votes>"),
    "zip": (b"PK\x03\x04....", "looks like a zip"),
    "UTF-16": (document(qa_rows()).decode().encode("utf-16"), "UTF-16"),
    "text": (b"Id,Score\n1,2\n", "not XML"),
    "no rows": (b"<posts />", "no rows"),
    "not one row": (b"<posts>\n</posts>", "the posts table has no rows"),
    "encoding": (document(qa_rows(), head='<?xml version="1.0" encoding="latin-1"?>'), "encoding 'latin-1'"),
    "encoding of two lines": (document(qa_rows(), head='<?xml version="1.0" encoding="a\nb"?>\n'), r"encoding 'a\\nb'"),
    "doctype": (document(qa_rows()).replace(b"<posts>", BOMB + b"\n<posts>"), "line 2 declares a DOCTYPE"),
    "doctype in the table": (document(qa_rows()).replace(b"<posts>", b"<posts>\n" + BOMB), "line 3 declares a DOCTYPE"),
    "doctype among rows": (document(qa_rows(), BOMB.decode(), qa_rows(9)), "line [0-9]+ declares a DOCTYPE"),
    "cut in a row": (document(qa_rows())[:-40], "cut short"),
    "cut after a row": (document(qa_rows()).removesuffix(b"</posts>\n"), "cut short"),
    "something else in the table": (document("<note/>\n", qa_rows()), "other than rows"),
}


HOSTILE = {
    "comments before the table": b"<!---->" * 5000 + b"x",
    "comments among the rows": document(qa_rows(1), "<!---->" * 5000 + "x" + "<!--" * 5000),
    "comments that have no end": document("<!--" * 100_000),
    "white space": b"<posts>" + b" \n" * 2_000_000 + b"</posts>",
    "instructions": b"<?a?>" * 10_000 + b"<posts>",
    "rows of nothing": b"<posts>" + b"<row" * 50_000 + b"</posts>",
    "one long row": b"<posts><row Body='" + b"&#60;" * 3_000_000 + b"</posts>",
    "one long name": b"<posts><row " + b"a" * 5_000_000 + b"/></posts>",
    "attributes": b"<posts><row " + b"".join(b"a%d='' " % n for n in range(100_000)) + b"/></posts>",
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_answered_in_seconds(tmp_path, content):
    start = sum(os.times()[:4])
    with pytest.raises(ValueError, match=r"Posts\.xml"):
        make_posts(tmp_path / "posts", write_dump(tmp_path, content), config=Posts(max_bad_rows_share=1.0))
    assert sum(os.times()[:4]) - start < 20


def test_hostile_marks_of_languages_take_no_time(tmp_path):
    bodies = {1: "<pre " * 200_000, 11: "<pre " + "class " * 200_000, 21: "<pre " + "class='a" * 200_000,
              31: "<code class='lang-" * 99_999, 41: "<pre class='lang-py'>"}
    rows = [question(n, Body=body) + answer(n + 1, n) + answer(n + 2, n) for n, body in bodies.items()]
    start = sum(os.times()[:4])
    assert len(posts_from_rows(tmp_path, *rows, config=Posts(code_languages=("py",)))[1]) == 1
    assert sum(os.times()[:4]) - start < 10


@pytest.mark.parametrize("content, message", NO_DUMP.values(), ids=NO_DUMP)
def test_what_is_no_dump_is_refused(tmp_path, content, message):
    with pytest.raises(ValueError, match=message) as error:
        make_posts(tmp_path / "posts", write_dump(tmp_path, content))
    assert "Posts.xml" in str(error.value) and "\n" not in str(error.value)
    assert not list((tmp_path / "posts").glob("scratch*"))


PAIRED = {"qid": 5, "question": "How *many*?", "date": "2015/09/02", "response_j": "ten", "response_k": "two",
          "metadata": ["https://a.b.com/questions/5", "https://a.b.com", "https://a.b.com/users/1/"]}
PREFERRED = {"qid": 5, "question": "<p>Q</p>", "date": "2015/09/02", "metadata": PAIRED["metadata"], "answers": [
    {"answer_id": 6, "author": "Ann", "author_id": 1, "pm_score": 4, "selected": True, "text": "x"},
    {"answer_id": 7, "author": "B", "author_id": 2, "pm_score": 0, "selected": False, "text": "y"}]}


@pytest.mark.parametrize("published", ["local", "hub"])
def test_published_sets(tmp_path, monkeypatch, published):
    def publish(rows):
        if published == "hub":
            monkeypatch.setattr("datasets.load_dataset", lambda place, split, streaming: iter(rows))
            return "owner/name"
        (tmp_path / "set/data").mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "set/data/x.parquet")
        return str(tmp_path / "set")

    metrics, [first, second, *_] = make_posts(tmp_path / "a", publish([PAIRED, PAIRED | {"response_k": "none"},
                                                                     PAIRED | {"response_j": None}]))
    assert [(a["text"], a["score"], a["votes"]) for a in second["answers"]] == [("ten", 1, None), ("none", 0, None)]
    assert (first["site"], first["question_id"], first["markup"]) == ("a.b.com", 5, "markdown")
    assert metrics["rows_set_aside"] == 1
    _, [record] = make_posts(tmp_path / "b", publish([PREFERRED]))
    assert [(a["id"], a["score"], a["accepted"]) for a in record["answers"]] == [(6, 4, True), (7, 0, False)]
    assert record["markup"] == "html" and record["answers"][0]["author"] == "Ann"
    with pytest.raises(ValueError, match="columns qid, text; expected"):
        make_posts(tmp_path / "c", publish([{"qid": 1, "text": "x"}]))


def test_a_hub_id_that_cannot_be_had(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise ConnectionError("no\nnetwork")
    monkeypatch.setattr("datasets.load_dataset", fail)
    with pytest.raises(ValueError, match=r"owner/name: no such file.*from the hub.*ConnectionError: no network"):
        make_posts(tmp_path / "posts", "owner/name")


