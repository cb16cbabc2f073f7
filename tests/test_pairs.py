"""Questions to preference pairs."""

from collections import Counter
from math import log2
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from stages import pairs
from stages.recipe import Pairs, Posts
from tests import dumps
from tests.dumps import answer, document, make_posts, plain, question, write

SPLITS = ("finetune", "reward", "rl", "evaluation")
PUBLISHED = Pairs()


def make_pairs(out: Path, posts: Path, config: Pairs = PUBLISHED) -> tuple[dict, dict[str, pandas.DataFrame]]:
    """Run the stage: (metrics, table of each split)."""
    out.mkdir(parents=True)
    metrics = pairs.run(config, out, posts=posts)
    tables = {name: pandas.read_parquet(out / f"{name}.parquet") for name in SPLITS}
    assert metrics["pairs_by_split"] == {name: len(table) for name, table in tables.items()}
    assert metrics["pairs_drawn"] == metrics["pairs"] + sum(metrics["dropped_pairs"].values())
    return metrics, tables


def pairs_of(folder: Path, *rows: str, config: Pairs = PUBLISHED) -> tuple[dict, pandas.DataFrame]:
    """(metrics, all pairs) of a dump of these rows."""
    make_posts(folder / "posts", write(folder, document(*rows)))
    metrics, tables = make_pairs(folder / "pairs", folder / "posts", config)
    return metrics, pandas.concat(tables.values())


def slow_score(votes: int, accepted: bool) -> int:
    return -1 if votes < 0 else round(log2(1 + votes)) + accepted


@pytest.mark.parametrize("name, count", [
    ("coffee.stackexchange.com", 129), ("economics-2012", 280), ("ai.stackexchange.com.7z", 597)])
def test_real_dumps(tmp_path, name, count):
    """Pair counts of the dumps' README.md, and every pair checked against plain loops over the posts."""
    _, records = make_posts(tmp_path / "posts", str(dumps.real(name)), config=Posts())
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
    assert set(table.qid) == {qid for qid, found in possible.items() if found}
    homes = [set(t.qid) for t in tables.values()]
    assert sum(map(len, homes)) == len(set().union(*homes)) == metrics["questions"]


def test_a_row(tmp_path):
    _, table = pairs_of(tmp_path, question(1, OwnerDisplayName="Asker", Body="<p><b>Why</b>?</p>", Title="Title"),
                        answer(2, 1, 0, OwnerUserId=22), answer(3, 1, 3, OwnerUserId=33))
    [row] = table.to_dict("records")
    assert list(row.pop("metadata")) == ["https://site.test/questions/1", "site.test", "Asker", "user 33", "user 22"]
    assert row == {"qid": 1, "site": "site.test", "question": "**Why**?", "response_j": "answer 3",
                   "response_k": "answer 2", "score_j": 2, "score_k": 0, "date": "2020-01-01T00:00:00.000"}


def test_each_needed_post_is_converted_once(tmp_path, monkeypatch):
    converted = []
    monkeypatch.setattr(pairs, "markdown_of", lambda text, markup: converted.append(text) or text)
    many = [answer(number, 1, number) for number in range(2, 12)]
    unneeded = [question(50), answer(51, 50, 1), answer(52, 50, 1)]
    metrics, table = pairs_of(tmp_path, question(1), *many, *unneeded, config=Pairs(max_pairs_per_question=3))
    needed = {*table.question, *table.response_j, *table.response_k}
    assert len(table) == 3 and sorted(converted) == sorted(needed)
    assert metrics["conversions"] == len(needed) and metrics["dropped_questions"] == {"all scores equal": 1}


def test_reasons_for_dropping(tmp_path):
    deep = "<div>" * 400 + "x"
    metrics, table = pairs_of(
        tmp_path, plain(100),
        question(10), answer(11, 10, 9, Body="<p> \n</p>"), answer(12, 10), answer(13, 10, 1, Body=""),  # 3 pairs
        question(20), answer(21, 20, 9, Body="<p>same</p>"), answer(22, 20, 0, Body="same"),
        question(30), answer(31, 30, 9, Body=deep), answer(32, 30),
        question(40, Body=deep), answer(41, 40, 9), answer(42, 40),
        question(50, Body=" "), answer(51, 50, 9), answer(52, 50))
    assert list(table.qid) == [100]
    assert metrics["dropped_pairs"] == {"answer empty": 3, "answers equal": 1, "answer not converted": 1,
                                        "question not converted": 1, "question empty": 1}
    assert metrics["dropped_questions"] == {"all pairs dropped": 5}
    assert metrics["posts_not_converted_ids"] == {"nested too deeply": ["site.test 31", "site.test 40"]}


def test_splits_by_question_across_sites(tmp_path):
    rows = [plain(n) for n in range(1, 600, 3)]
    sites = [write(tmp_path, document(*rows), f"{name}.test/Posts.xml") for name in "ab"]
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


def test_the_same_bytes_on_a_rerun_and_for_any_size_of_part(tmp_path):
    given = write(tmp_path, document(*(plain(n) for n in range(1, 3000, 3))))
    for name, size in (("a", 50_000), ("b", 50_000), ("c", 77)):
        make_posts(tmp_path / name / "posts", given, config=Posts(questions_per_part=size))
        make_pairs(tmp_path / name / "pairs", tmp_path / name / "posts")
    for split in SPLITS:
        assert len({(tmp_path / name / "pairs" / f"{split}.parquet").read_bytes() for name in "abc"}) == 1


def test_a_question_is_paired_alike_in_any_company(tmp_path):
    crowd = [question(1), *(answer(n, 1, n) for n in range(2, 30))]
    _, alone = pairs_of(tmp_path / "a", *crowd)
    _, company = pairs_of(tmp_path / "b", plain(100), *reversed(crowd))
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
    with pytest.raises(ValueError, match=r"no pair comes of its questions.*all scores equal"):
        pairs_of(tmp_path / "b", question(1), answer(2, 1), answer(3, 1))
