"""Test questions to preference pairs."""

from collections import Counter
from math import log2
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import gather, pairs
from stages.command_line.command import make
from stages.recipe.sections.data import Pairs, Posts
from stages.stackexchange.pairs import build as pairs_build
from stages.stackexchange.pairs.table import read_pairs, space_evenly
from tests.helpers import stackexchange_dumps
from tests.helpers.stackexchange_dumps import answer, document, make_posts, qa_rows, question, write_dump

SPLITS = ("finetune", "reward", "rl", "evaluation")
PUBLISHED = Pairs()


def make_pairs(out: Path, posts: Path, config: Pairs = PUBLISHED, **options
               ) -> tuple[dict, dict[str, pandas.DataFrame]]:
    """Run the stage: (metrics, table of each split); every post and pair must be accounted for."""
    out.mkdir(parents=True, exist_ok=True)
    metrics = pairs.run(config, out, posts=posts, **options)
    tables = {name: pandas.read_parquet(out / name) for name in SPLITS}
    assert metrics["pairs_by_split"] == {name: len(table) for name, table in tables.items()}
    assert metrics["pairs_drawn"] == metrics["pairs"] + sum(metrics["dropped_pairs"].values())
    assert metrics["posts_in"] == metrics["posts_out"] + sum(metrics["dropped_posts"].values())
    assert {p.name for p in out.iterdir()} == {*SPLITS, "README.md", "metrics.json"}
    return metrics, tables


def pairs_of(folder: Path, *rows: str, config: Pairs = PUBLISHED) -> tuple[dict, pandas.DataFrame]:
    """(metrics, all pairs) of a dump of these rows."""
    make_posts(folder / "posts", write_dump(folder, document(*rows)))
    metrics, tables = make_pairs(folder / "pairs", folder / "posts", config)
    return metrics, pandas.concat(tables.values())


def slow_score(votes: int, accepted: bool) -> int:
    return -1 if votes < 0 else round(log2(1 + votes)) + accepted


@pytest.mark.parametrize("name, count", [
    ("coffee.stackexchange.com", 129), ("economics-2012", 280), ("ai.stackexchange.com.7z", 597),
    ("beer.stackexchange.com.7z", 1789), ("quantumcomputing.stackexchange.com.7z", 572),
    ("matheducators.stackexchange.com.7z", 1471), ("startups.stackexchange.com.7z", 3079)])
def test_real_dumps(tmp_path, name, count):
    """Pair counts of the dumps' README.md, and every pair checked against plain loops over the posts."""
    _, records = make_posts(tmp_path / "posts", str(stackexchange_dumps.real_dump(name)), config=Posts())
    metrics, tables = make_pairs(tmp_path / "pairs", tmp_path / "posts")
    table = pandas.concat(tables.values())
    assert len(table) == metrics["pairs"] == count and not metrics["posts_not_converted"]
    assert (table.score_j > table.score_k).all()
    possible = {}
    for record in records:
        scores = [slow_score(a["votes"], a["accepted"]) for a in record["answers"]]
        assert scores == [a["score"] for a in record["answers"]]
        possible[record["question_id"]] = Counter((a, b) for a in scores for b in scores if a > b)
    for qid, rows in table.groupby("qid"):
        drawn = Counter(zip(rows.score_j, rows.score_k, strict=True))
        assert drawn <= possible[qid] and len(rows) == min(10, possible[qid].total())
    assert set(table.qid) == {qid for qid, pairs in possible.items() if pairs}
    homes = [set(t.qid) for t in tables.values()]
    assert sum(map(len, homes)) == len(set().union(*homes)) == metrics["questions"]


def test_a_row(tmp_path):
    _, table = pairs_of(tmp_path, question(1, OwnerDisplayName="Asker", Body="<p><b>Why</b>?</p>", Title="Title"),
                        answer(2, 1, 0, OwnerUserId=22), answer(3, 1, 3, OwnerUserId=33))
    [row] = table.to_dict("records")
    lists = {name: list(row.pop(name)) for name in ("metadata", "authors", "author_urls", "licenses")}
    user = "https://site.test/users/"
    assert lists == {"metadata": ["https://site.test/questions/1", "https://site.test", f"{user}7"],
                     "authors": ["Asker", "user 33", "user 22"], "licenses": ["CC BY-SA 4.0"] * 3,
                     "author_urls": [f"{user}7", f"{user}33", f"{user}22"]}
    assert row == {"qid": 1, "site": "site.test", "question": "**Why**?", "response_j": "answer 3", "answer_j": 3,
                   "response_k": "answer 2", "answer_k": 2, "score_j": 2, "score_k": 0,
                   "date": "2020-01-01T00:00:00.000", "date_j": "2020-01-02T00:00:00.000",
                   "date_k": "2020-01-02T00:00:00.000"}


def test_each_needed_post_is_converted_once(tmp_path, monkeypatch):
    converted = []
    monkeypatch.setattr(pairs_build, "_converter", lambda *_: lambda text, markup: converted.append(text) or text)
    many = [answer(number, 1, number) for number in range(2, 12)]
    unneeded = [question(50), answer(51, 50, 1), answer(52, 50, 1)]
    metrics, table = pairs_of(tmp_path, question(1), *many, *unneeded, config=Pairs(max_pairs_per_question=3))
    needed = {*table.question, *table.response_j, *table.response_k}
    assert len(table) == 3 and sorted(converted) == sorted(needed)
    assert metrics["conversions"] == len(needed) and metrics["dropped_questions"] == {"no two scores differ enough": 1}


def test_reasons_for_dropping(tmp_path):
    deep = "<div>" * 400 + "x"
    metrics, table = pairs_of(
        tmp_path, qa_rows(100),
        question(10), answer(11, 10, 9, Body="<p> \n</p>"), answer(12, 10), answer(13, 10, 1, Body=""),  # 3 pairs
        question(20), answer(21, 20, 9, Body="<p>same</p>"), answer(22, 20, 0, Body="same"),
        question(30), answer(31, 30, 9, Body=deep), answer(32, 30),
        question(40, Body=deep), answer(41, 40, 9), answer(42, 40),
        question(50, Body=" "), answer(51, 50, 9), answer(52, 50))
    assert list(table.qid) == [100]
    assert metrics["dropped_pairs"] == {"answer empty": 3, "answers equal": 1, "answer not converted": 1,
                                        "question not converted": 1, "question empty": 1}
    assert metrics["dropped_questions"] == {"question without a usable pair": 3, "question not converted": 1,
                                            "question empty": 1}
    assert metrics["dropped_posts"] == {
        "question without a usable pair": 3, "question not converted": 3, "question empty": 3,
        "answer empty": 2, "answer not converted": 1, "answer in dropped pairs only": 4}
    assert {reason: sorted(ids) for reason, ids in metrics["posts_not_converted_ids"].items()} == {
        "nested too deeply": ["site.test 31", "site.test 40"]}


def test_splits_by_question_across_sites(tmp_path):
    rows = [qa_rows(n) for n in range(1, 600, 3)]
    sites = [write_dump(tmp_path, document(*rows), f"{name}.test/Posts.xml") for name in "ab"]
    make_posts(tmp_path / "posts", *sites)
    metrics, tables = make_pairs(tmp_path / "pairs", tmp_path / "posts")
    homes = {}
    for name, table in tables.items():
        assert len(table)
        for key in zip(table.site, table.qid, strict=True):
            assert homes.setdefault(key, name) == name
    assert len(homes) == metrics["questions"] == 400
    assert any(homes["a.test", n] != homes["b.test", n] for n in range(1, 600, 3))
    reward_only = Pairs(finetune_share=0.0, rl_share=0.0, evaluation_share=0.0)
    only, _ = make_pairs(tmp_path / "only", tmp_path / "posts", reward_only)
    assert only["questions_by_split"] == {"finetune": 0, "reward": 400, "rl": 0, "evaluation": 0}


def shards(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_the_same_bytes_on_a_rerun_and_for_any_number_of_processes(tmp_path, monkeypatch):
    dump = write_dump(tmp_path, document(*(qa_rows(n) for n in range(1, 3000, 3))))
    monkeypatch.setattr("stages.stackexchange.questions.table.GROUP_QUESTIONS", 50)
    make_posts(tmp_path / "posts", dump, config=Posts(part_bytes=200_000))
    for name, processes in (("a", 1), ("b", 1), ("c", 2), ("d", 4)):
        make_pairs(tmp_path / name, tmp_path / "posts", processes=processes)
    expected = shards(tmp_path / "a")
    assert len(expected) == 2 + 4 * len(list((tmp_path / "posts").glob("part-*"))) > 12
    assert all(shards(tmp_path / name) == expected for name in "bcd")


def test_the_order_of_pairs_does_not_know_of_parts(tmp_path):
    dump, rows = write_dump(tmp_path, document(*(qa_rows(n) for n in range(1, 3000, 3)))), {}
    for name, part_bytes in (("a", 1 << 27), ("b", 100_000)):
        make_posts(tmp_path / name / "posts", dump, config=Posts(part_bytes=part_bytes))
        make_pairs(tmp_path / name / "pairs", tmp_path / name / "posts")
        rows[name] = [list(read_pairs(tmp_path / name / "pairs", split)) for split in SPLITS]
    assert rows["a"] == rows["b"] and sum(map(len, rows["a"])) == 1000


def test_shares_gathered_are_the_whole(tmp_path):
    make_posts(tmp_path / "posts", write_dump(tmp_path, document(*(qa_rows(n) for n in range(1, 3000, 3)))),
               config=Posts(part_bytes=100_000))
    artifacts = {"posts": tmp_path / "posts"}
    make(pairs.run, PUBLISHED, tmp_path / "whole", artifacts, {"processes": 1, "share": "1/1"})
    for number in (1, 2, 3):
        make(pairs.run, PUBLISHED, tmp_path / f"{number}-of-3", artifacts, {"processes": 1, "share": f"{number}/3"})
    shares = [str(tmp_path / f"{number}-of-3" / "manifest.json") for number in (3, 1, 2)]
    make(gather.run, PUBLISHED, tmp_path / "gathered", {"shares": shares})
    whole, gathered = shards(tmp_path / "whole"), shards(tmp_path / "gathered")
    assert whole.keys() == gathered.keys() and len(whole) > 20
    assert all(whole[name] == gathered[name] for name in whole if name.endswith((".parquet", ".md")))
    for bad, message in [(shares[:2], r"these are the shares 3/3, 1/3; needed are 1/2, 2/2"),
                         ([shares[0], shares[0], shares[1]], "these are the shares")]:
        with pytest.raises(ValueError, match=message):
            make(gather.run, PUBLISHED, tmp_path / "no", {"shares": bad})
    make(pairs.run, Pairs(seed=1), tmp_path / "other", artifacts, {"share": "2/3"})
    with pytest.raises(ValueError, match="another config than"):
        make(gather.run, PUBLISHED, tmp_path / "no", {"shares": [shares[0], shares[1], str(tmp_path / "other")]})


@pytest.mark.parametrize("share", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3", ""])
def test_shares_that_are_none(tmp_path, share):
    make_posts(tmp_path / "posts", write_dump(tmp_path, document(qa_rows())))
    with pytest.raises(ValueError, match="give its number and the number of shares"):
        pairs.run(PUBLISHED, tmp_path / "posts", posts=tmp_path / "posts", share=share)


def test_killed_pairs_go_on_with_the_parts_that_are_missing(tmp_path, monkeypatch):
    make_posts(tmp_path / "posts", write_dump(tmp_path, document(*(qa_rows(n) for n in range(1, 3000, 3)))),
               config=Posts(part_bytes=50_000))
    make_pairs(tmp_path / "whole", tmp_path / "posts")
    convert, calls = pairs_build._converter, []

    def breaks_after(limit):
        def convert_some(*style):
            calls.append(1)
            if len(calls) > limit:
                raise KeyboardInterrupt
            return convert(*style)
        return convert_some
    out = tmp_path / "killed"
    out.mkdir()
    for _ in range(3):
        calls.clear()
        monkeypatch.setattr(pairs_build, "_converter", breaks_after(900))
        with pytest.raises(KeyboardInterrupt):
            pairs.run(PUBLISHED, out, posts=tmp_path / "posts")
    monkeypatch.setattr(pairs_build, "_converter", breaks_after(900))
    calls.clear()
    make_pairs(out, tmp_path / "posts")
    assert 0 < len(calls) < 900 and shards(out) == shards(tmp_path / "whole")


def test_min_score_gap(tmp_path):
    rows = [question(1), *(answer(n + 2, 1, votes) for n, votes in enumerate((0, 1, 3, 7, 15, 31)))]
    for gap, count in ((1, 10), (3, 6), (4, 3), (5, 1)):
        _, table = pairs_of(tmp_path / str(gap), *rows, config=Pairs(min_score_gap=gap))
        assert len(table) == count and (table.score_j - table.score_k).min() >= gap
    with pytest.raises(ValueError, match="no two scores differ enough"):
        pairs_of(tmp_path / "6", *rows, config=Pairs(min_score_gap=6))


def test_only_later_answers_win(tmp_path):
    rows = [question(1), *(answer(n, 1, votes, CreationDate=f"2020-01-{day:02}T00:00:00.000")
                           for n, (votes, day) in enumerate(((9, 3), (3, 4), (1, 2), (0, 4), (0, 3)), 2)),
            question(50), answer(51, 50, 9, CreationDate="2020-01-02"), answer(52, 50, CreationDate="2020-01-03")]
    metrics, table = pairs_of(tmp_path / "a", *rows, config=Pairs(later_wins=True))
    assert set(zip(table.answer_j, table.answer_k, strict=True)) == {(2, 4), (3, 4), (3, 6)}
    assert (table.date_j > table.date_k).all()
    assert metrics["dropped_questions"] == {"no later answer scores higher": 1}
    assert "whose better answer is the later one" in (tmp_path / "a/pairs/README.md").read_text()
    undated = [{"qid": n, "question": "q", "date": "2015/09/02", "response_j": "a", "response_k": "b",
                "metadata": ["https://a.b.com/questions/5", "https://a.b.com"]} for n in range(3)]
    pq.write_table(pa.Table.from_pylist(undated), tmp_path / "x.parquet")
    make_posts(tmp_path / "posts", str(tmp_path / "x.parquet"))
    with pytest.raises(ValueError, match=r"no pair comes of its questions.*'the source has no dates of answers': 3"):
        make_pairs(tmp_path / "none", tmp_path / "posts", Pairs(later_wins=True))


LENGTHS = {
    "short answer": ({"min_answer_length": 5}, {"answer too short": 1}),
    "long answer": ({"max_answer_length": 20}, {"answer too long": 1}),
    "short question": ({"min_question_length": 99}, None),
    "all fit": ({"min_answer_length": 1, "max_answer_length": 40, "max_question_length": 9}, {}),
}


@pytest.mark.parametrize("lengths, dropped", LENGTHS.values(), ids=LENGTHS)
def test_lengths_in_characters(tmp_path, lengths, dropped):
    rows = [question(1, Body="why, then"), answer(2, 1, 9, Body="x" * 40), answer(3, 1, 3, Body="1234567890"),
            answer(4, 1, 0, Body="no")]
    if dropped is None:
        with pytest.raises(ValueError, match="question too short"):
            pairs_of(tmp_path, *rows, config=Pairs(**lengths))
        return
    metrics, table = pairs_of(tmp_path, *rows, config=Pairs(**lengths))
    assert len(table) == (1 if dropped else 3)
    assert metrics["dropped_pairs"] == dict.fromkeys(dropped, 2)
    assert metrics["dropped_posts"] == dropped


def test_lengths_in_tokens(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    tokenizer = Tokenizer(models.WordLevel({"?": 0, "a": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save(str(tmp_path / "tokenizer/tokenizer.json"))
    rows = [question(1), answer(2, 1, 9, Body="a a a a"), answer(3, 1, 3, Body="a" * 99), answer(4, 1, 0, Body="b c")]
    config = {"length_unit": "tokens", "max_answer_length": 3, "tokenizer": str(tmp_path / "tokenizer")}
    metrics, table = pairs_of(tmp_path, *rows, config=Pairs(**config))
    assert list(table.answer_j) == [3] and metrics["dropped_posts"] == {"answer too long": 1}
    with pytest.raises(ValueError, match=r"tokenizer .*nowhere: no such folder"):
        pairs_of(tmp_path / "b", *rows, config=Pairs(**config | {"tokenizer": str(tmp_path / "nowhere")}))


def test_clean_and_published_markdown(tmp_path):
    code = answer(2, 1, 9, Body="<pre><code>\n\n  x\n\n\n  y</code></pre>")
    rows = [question(1, Body="<p>my_var</p>"), code, answer(3, 1)]
    for style, texts in (("published", ("my\\_var", "```\n  x\n\n  y\n```")),
                         ("clean", ("my_var", "```\n\n\n  x\n\n\n  y\n```"))):
        _, table = pairs_of(tmp_path / style, *rows, config=Pairs(markdown=style))
        assert (table.question[0], table.response_j[0]) == texts


@pytest.mark.parametrize("body, reason", [
    ("x" * 200_001, "too long"), ("<b>1</b>" * 2_501, "too many tags"), ("<div>" * 101 + "x", "nested too deeply"),
    ("x" + " " * 1_001 + "y", "too much white space")])
def test_a_post_over_a_cap_is_counted_and_its_question_dropped(tmp_path, body, reason):
    rows = [qa_rows(10), question(1), answer(2, 1, 9, Body=body), answer(3, 1)]
    metrics, table = pairs_of(tmp_path, *rows)
    assert metrics["posts_not_converted"] == {reason: 1} and list(table.qid) == [10]


def test_columns_of_the_published_set_stand_in_the_same_places(tmp_path):
    """lvwerra/stack-exchange-paired: qid, question, date, metadata of three, response_j, response_k."""
    _, table = pairs_of(tmp_path, qa_rows(1))
    assert {"qid", "question", "date", "metadata", "response_j", "response_k"} <= set(table.columns)
    assert [len(row) for row in table.metadata] == [3]


def test_a_question_is_paired_alike_in_any_company(tmp_path):
    crowd = [question(1), *(answer(n, 1, n) for n in range(2, 30))]
    _, alone = pairs_of(tmp_path / "a", *crowd)
    _, company = pairs_of(tmp_path / "b", qa_rows(100), *reversed(crowd))
    columns = ["response_j", "response_k"]
    assert alone[columns].values.tolist() == company[company.qid == 1][columns].values.tolist()
    assert len(alone) == 10


def test_questions_alike_are_drawn_apart(tmp_path):
    alike = [question(100), question(200), *(answer(qid + n, qid, 2**n) for qid in (100, 200) for n in range(1, 20))]
    _, table = pairs_of(tmp_path, *alike)
    first, second = (table[table.qid == qid][["score_j", "score_k"]].values.tolist() for qid in (100, 200))
    assert len(first) == len(second) == 10 and first != second


def test_the_published_pairs_come_through_as_they_are(tmp_path):
    rows = [{"qid": 5, "question": "How *many*?", "date": "2015/09/02", "response_j": f"best {n}",
             "response_k": "my\\_var <b>", "metadata": ["https://a.b.com/questions/5", "https://a.b.com"]}
            for n in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    make_posts(tmp_path / "posts", str(tmp_path / "x.parquet"))
    table = pandas.concat(make_pairs(tmp_path / "pairs", tmp_path / "posts")[1].values())
    for name in ("qid", "question", "date", "response_j", "response_k"):
        assert list(table[name]) == [row[name] for row in rows]


def test_what_cannot_be_used_is_said(tmp_path):
    with pytest.raises(ValueError, match="no part-"):
        make_pairs(tmp_path / "a", tmp_path)
    with pytest.raises(ValueError, match=r"no pair comes of its questions.*no two scores differ"):
        pairs_of(tmp_path / "b", question(1), answer(2, 1), answer(3, 1))


def test_rows_are_spaced_evenly_over_all():
    assert space_evenly(range(10), 3) == list(range(0, 9, 3)) and space_evenly(range(10), 0) == []
    assert space_evenly(range(3), 9) == [0, 1, 2]
