"""Questions by id and by tag, and the export of pairs for TRL."""

import json

import datasets
import pytest

from stages import inspect, pairs
from stages.artifacts.artifact import MANIFEST, digest
from stages.recipe.sections.data import Pairs
from stages.render.terminal import WIDTH
from stages.runtime.files import write_json
from stages.stackexchange.pairs.table import read_pairs
from stages.stackexchange.prompt import prompt_text
from tests.helpers.stackexchange_dumps import answer, posts_from_rows, question

EVIL = "\x9b31m\x85\u202egnp.exe"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """posts and pairs of 40 questions, each with three answers; every fourth has the tag `red`."""
    folder = tmp_path_factory.mktemp("run")
    rows = (question(n, Tags="<red><x>" if n % 40 == 10 else "<blue>", Body=f"<p>Is {n} {EVIL} big?</p>") +
            "".join(answer(n + k, n, score, Body=f"<p>Answer {n + k}.</p><pre><code>a\n  b {EVIL}\n</code></pre>")
                    for k, score in ((1, 0), (2, 7), (3, 2)))
            for n in range(10, 410, 10))
    posts_from_rows(folder, *rows)
    write_json(folder / "posts" / MANIFEST, {"stage": "posts", "inputs": {}})
    (folder / "pairs").mkdir()
    pairs.run(Pairs(), folder / "pairs", posts=folder / "posts")
    write_json(folder / "pairs" / MANIFEST, {"stage": "pairs", "inputs": {
        "posts": {"path": str(folder / "posts"), "sha256": digest(folder / "posts")}}})
    return folder


def printed(capsys, *arguments: object) -> str:
    assert inspect.main([str(argument) for argument in arguments]) == 0
    text, errors = capsys.readouterr()
    assert not errors and ("--json" in arguments or max(map(len, text.split("\n"))) <= WIDTH)
    assert [sign for sign in text if not sign.isprintable() and sign != "\n"] == []
    return text


def test_a_question_of_posts_is_shown_with_its_answers_best_first(run, capsys):
    text = printed(capsys, run / "posts", "--id", "50")
    order = [text.index(part) for part in ("question 50; site.test; red, x", "title 50", "Is 50 ",
                                           "[1] score 3; answer 52", "Answer 52.", "[2] score 2; answer 53",
                                           "[3] score 0; answer 51")]
    assert order == sorted(order) and "Is 60" not in text


def test_a_question_of_pairs_is_shown_with_its_answers_once_and_its_pairs(run, capsys):
    text = printed(capsys, run / "pairs", "--id", "site.test/50")
    assert "pairs, better > worse: [1] > [2], [1] > [3], [2] > [3]" in text
    assert [text.count(f"Answer {number}.") for number in (51, 52, 53)] == [1, 1, 1]
    assert "[1] score 3; answer 52; by user 8" in text
    assert "    a\n      b " in text, "code keeps its lines"


def test_questions_by_tag_are_the_first_ones(run, capsys):
    rows = json.loads(printed(capsys, run / "posts", "--tag", "red", "--questions", "100", "--json"))
    assert {row["question_id"] % 40 for row in rows} == {10} and len(rows) == 10
    assert len(json.loads(printed(capsys, run / "posts", "--tag", "red", "--json"))) == inspect.MAX_QUESTIONS


@pytest.mark.parametrize("words, said", [
    (("posts", "--id", "11"), "has no question 11"), (("posts", "--tag", "green"), "no question with the tag green"),
    (("pairs", "--tag", "red"), "has no tags: give the posts artifact"),
    (("posts", "--id", "x"), "takes a question's number"), (("posts", "--export", "trl"), "only pairs can be exported"),
    (("pairs", "--export", "trl"), "needs --out"),
    (("pairs", "--export", "trl", "--out", "/tmp/x.csv"), "ends in .parquet or .jsonl"),
    (("pairs", "--export", "trl", "--out", "/no/such/x.jsonl"), "there is no folder /no/such")])
def test_a_mistake_is_one_line(run, capsys, words, said):
    assert inspect.main([str(run / words[0]), *words[1:]]) == 1
    text, errors = capsys.readouterr()
    assert not text and errors.startswith("inspect: error: ") and said in errors and errors.count("\n") == 1


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_exported_pairs_are_what_trl_trains_on(run, capsys, tmp_path, suffix):
    """Texts named prompt, chosen and rejected are TRL's preference format with an explicit prompt."""
    out = tmp_path / f"pairs.{suffix}"
    assert inspect.main([str(run / "pairs"), "--export", "trl", "--out", str(out)]) == 0
    assert f"{out}: 30 rows of prompt, chosen, rejected" in capsys.readouterr().out
    rows = datasets.load_dataset("json" if suffix == "jsonl" else suffix, data_files=str(out), split="train",
                                 cache_dir=str(tmp_path / "cache"))
    assert rows.column_names == ["prompt", "chosen", "rejected"]
    assert {str(value) for value in rows.features.values()} == {"Value('string')"}, "lists would be conversations"
    assert list(rows) == [{"prompt": prompt_text(row["question"]), "chosen": row["response_j"],
                           "rejected": row["response_k"]} for row in read_pairs(run / "pairs", "reward")]


def test_an_export_never_overwrites_nor_leaves_half_a_file(run, capsys, tmp_path):
    out = tmp_path / "pairs.jsonl"
    out.write_text("mine")
    assert inspect.main([str(run / "pairs"), "--export", "trl", "--out", str(out)]) == 1
    assert "exists already" in capsys.readouterr().err and out.read_text() == "mine"
    other = str(tmp_path / "b.jsonl")
    assert inspect.main([str(run / "pairs"), "--export", "trl", "--split", "rl", "--out", other]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.jsonl", "pairs.jsonl"]
