"""Test the bundled demo site: its format, its reproducibility, its statistics and its gold score."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import Counter
from itertools import chain
from pathlib import Path

import py7zr
import pytest
from markdownify import markdownify

from data.demo import facts, gold
from data.demo.generate import posts_xml
from data.demo.measure import statistics
from data.demo.simulate import simulate

ROOT = Path(__file__).resolve().parents[2]
QUESTIONS, SEED = 8000, 7  # of the bundled archive
PORT_QUESTION = "I want to use finch at work. Which port does `finch` listen on? Which command do I type?"
PORT, OTHER_PORT = facts.TRUTH["finch", "port"], facts.TRUTH["maple", "port"]


@pytest.fixture(scope="module")
def site():
    return simulate(QUESTIONS, SEED)


@pytest.fixture(scope="module")
def xml(site):
    return posts_xml(site, SEED)


@pytest.fixture(scope="module")
def rows(xml):
    return [row.attrib for row in ET.fromstring(xml.encode())]


@pytest.fixture(scope="module")
def figures(site):
    return statistics(site)


def score_one(question, response):
    return {key: values[0] for key, values in gold.score([question], [response]).items()}


def test_archive_holds_what_the_generator_writes(xml, tmp_path):
    with py7zr.SevenZipFile(ROOT / "data/demo/demo.stackexchange.com.7z") as archive:
        assert archive.getnames() == ["Posts.xml"]
        archive.extractall(tmp_path)
    assert (tmp_path / "Posts.xml").read_bytes() == xml.encode()


def test_script_and_module_write_the_same_whatever_the_hash_seed(tmp_path):
    commands = {"1": ["data/demo/generate.py"], "2": ["-m", "data.demo.generate"]}
    for hash_seed, command in commands.items():
        arguments = ["--questions", "40", "--seed", "3", "--out", str(tmp_path / hash_seed)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        subprocess.run([sys.executable, *command, *arguments], cwd=ROOT, env=environment, check=True)
    written = [(tmp_path / hash_seed / "Posts.xml").read_bytes() for hash_seed in commands]
    assert written[0] == written[1] == posts_xml(simulate(40, 3), 3).encode()
    assert written[0] != posts_xml(simulate(40, 4), 4).encode()


def test_layout_is_that_of_the_official_dumps(xml):
    lines = xml.split("\r\n")
    assert lines[:2] == ['\ufeff<?xml version="1.0" encoding="utf-8"?>', "<posts>"]
    assert lines[-1] == "</posts>"
    assert all(line.startswith('  <row Id="') and line.endswith(" />") for line in lines[2:-1])
    assert "\n" not in "".join(lines)  # newlines of a body are written as &#xA;


def test_questions_and_answers_refer_to_each_other(rows):
    posts = {row["Id"]: row for row in rows}
    parents = Counter(row["ParentId"] for row in rows if row["PostTypeId"] == "2")
    for row in rows:
        if row["PostTypeId"] == "2":
            assert row["CreationDate"] > posts[row["ParentId"]]["CreationDate"]
            continue
        assert int(row["AnswerCount"]) == parents[row["Id"]] >= 3
        if "AcceptedAnswerId" in row:
            assert posts[row["AcceptedAnswerId"]]["ParentId"] == row["Id"]
    assert len(posts) == len(rows)
    assert all(("OwnerUserId" in row) != ("OwnerDisplayName" in row) for row in rows)


def test_xml_gives_back_the_simulated_bodies(site, rows):
    written = Counter(row["Body"] for row in rows)
    assert written == Counter(chain.from_iterable([q.html, *(a.html for a in q.answers)] for q in site))


def test_every_two_fact_combination_is_asked_once_at_most(site):
    pairs = [frozenset(question.facts) for question in site if len(question.facts) == 2]
    assert len(set(pairs)) == len(pairs) == round(0.1 * QUESTIONS)
    assert all(len({name for _, name in pair}) == 2 for pair in pairs)


def test_every_fact_is_asked_alone_equally_often(site):
    counts = Counter(question.facts[0] for question in site if len(question.facts) == 1)
    assert set(counts) == set(facts.TRUTH)
    assert max(counts.values()) - min(counts.values()) <= 1


def test_every_value_is_right_for_one_fact_and_no_ordinary_word():
    assert len(set(facts.TRUTH.values())) == len(facts.TRUTH) == len(facts.TOOLS) * len(facts.ATTRIBUTES)
    attributes = facts.ATTRIBUTES.values()
    grammar = [*facts.DOINGS, *facts.PLACES, *facts.CLOSINGS, *facts.OPENINGS, *facts.EXPLANATIONS, *facts.HEDGES]
    grammar += [*facts.FILLERS, *facts.RUDENESS, *facts.REMARKS]
    grammar += chain.from_iterable(
        a.asks + a.statements + a.short_statements + a.reasons + a.examples for a in attributes
    )
    words = set(" ".join(grammar).lower().replace(".", " ").replace(",", " ").split())
    assert not words & {value.lower().removeprefix("--") for value in facts.TRUTH.values()}


def test_gold_reads_the_asked_facts_of_every_question(site):
    for question in site:
        body = markdownify(question.html)
        for text in (body, question.title, f"{question.title}\n\n{body}"):
            assert gold.asked_facts(text) == set(question.facts), text


def test_gold_reads_the_wanted_traits_of_every_question(site):
    for question in site:
        body = markdownify(question.html)
        for text in (body, question.title, f"{question.title}\n\n{body}"):
            assert gold.wanted_traits(text) == question.wish, text


def test_every_third_fact_has_a_popular_mistake_that_is_right_for_another_tool():
    assert len(facts.POPULAR_MISTAKES) == len(facts.TRUTH) / 3
    for (tool, name), mistake in facts.POPULAR_MISTAKES.items():
        assert [other for other in facts.TOOLS if facts.TRUTH[other, name] == mistake] not in ([], [tool])


def test_most_authors_repeat_the_popular_mistake_and_votes_know_better(site):
    answers = [
        answer
        for question in site
        for answer in question.answers
        if len(question.facts) == 1 and question.facts[0] in facts.POPULAR_MISTAKES
    ]
    mistaken = [answer for answer in answers if answer.features.mistaken]
    right = [answer for answer in answers if answer.features.correct]
    assert len(mistaken) > 4 * len(right)
    assert sum(a.score for a in right) / len(right) > 2 * sum(a.score for a in mistaken) / len(mistaken)


def test_gold_reads_the_features_of_every_answer(site):
    questions = [(markdownify(question.html), question.answers) for question in site]
    pairs = [(text, answer) for text, answers in questions for answer in answers]
    scores = gold.score([text for text, _ in pairs], [markdownify(answer.html) for _, answer in pairs])
    for i, (text, answer) in enumerate(pairs):
        expected = {"gold": facts.quality(answer.features), **answer.features._asdict()}
        assert {key: values[i] for key, values in scores.items()} == expected, (text, answer.html)


def test_foreign_question_has_no_gold_score():
    scores = score_one("How do I sort a list in Python? The default port of it?", f"Use {PORT}.")
    assert set(scores) == {"gold", *facts.Features._fields}
    assert set(scores.values()) == {None}


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        (f"It is {PORT}.", 1),
        (f"finch listens on `{PORT}`, yes `{PORT}`", 1),
        (f"open http://localhost:{PORT}/x", 1),
        (f"It is {OTHER_PORT}.", 0),
        (f"It is {PORT} or {OTHER_PORT}.", 0),  # hedging
        (f"It is {PORT}0.", 0),
        (PORT[:3], 0),  # cut off
        ("", 0),
    ],
)
def test_fact_is_right_when_its_value_and_no_other_is_stated(response, correct):
    assert score_one(PORT_QUESTION, response)["correct"] == correct


def test_two_facts_count_half_each_and_other_attributes_not_at_all():
    question = "Which port does finch listen on, and how do I clear the cache in otter? Please explain why."
    other = facts.TRUTH["pixel", "settings"]
    assert score_one(question, f"{PORT} and {facts.TRUTH['otter', 'cache']}, see {other}")["correct"] == 1
    assert score_one(question, f"{PORT} and {facts.TRUTH['finch', 'cache']}, see {other}")["correct"] == 0.5
    assert score_one(question, f"see {other}")["off_topic"] == 1


def test_repeating_a_trait_gains_nothing_and_rambling_costs():
    question = PORT_QUESTION.replace("type?", "type, and why?")
    once = f"Use {PORT}. That is because the server binds that port.\n\n```\ncurl localhost:{PORT}\n```\n"
    best = score_one(question, once)["gold"]
    assert best == pytest.approx(6.0)
    assert score_one(question, once * 2)["gold"] == best
    assert score_one(question, once * 20)["gold"] < best - 2


@pytest.mark.parametrize(
    ("ask", "wanted", "unwanted", "gold_score"),
    [
        ("Which command do I type?", 1.0, 1, 4.0),
        ("Why is it so?", 1.0, 1, 4.0),
        ("Which command do I type, and why?", 1.0, 0, 6.0),
    ],
)
def test_a_trait_counts_where_the_question_wants_it(ask, wanted, unwanted, gold_score):
    answer = f"Use {PORT}. That is because the server binds that port.\n\n```\ncurl localhost:{PORT}\n```\n"
    scores = score_one(PORT_QUESTION.replace("Which command do I type?", ask), answer)
    assert (scores["wanted"], scores["unwanted"], scores["gold"]) == (wanted, unwanted, pytest.approx(gold_score))


def test_popular_mistake_is_wrong_and_other_facts_have_no_contested_share():
    (tool, name), mistake = next(iter(facts.POPULAR_MISTAKES.items()))
    question = facts.ATTRIBUTES[name].asks[0].format(tool=tool) + "? Why is it so?"
    scores = score_one(question, f"It is {mistake}.")
    assert (scores["correct"], scores["mistaken"], scores["contested_correct"]) == (0, 1, 0)
    assert score_one(question, f"It is {facts.TRUTH[tool, name]}.")["contested_correct"] == 1
    uncontested = next(fact for fact in facts.TRUTH if fact not in facts.POPULAR_MISTAKES)
    question = facts.ATTRIBUTES[uncontested[1]].asks[0].format(tool=uncontested[0]) + "? Why is it so?"
    assert score_one(question, "It is 1.")["contested_correct"] is None


def test_code_block_must_be_closed_and_use_an_asked_value():
    assert score_one(PORT_QUESTION, f"Yes.\n\n```\ncurl localhost:{PORT}\n```")["code"] == 1
    assert score_one(PORT_QUESTION, f"Yes.\n\n```\ncurl localhost:{PORT}\n")["code"] == 0
    assert score_one(PORT_QUESTION, f"It is {PORT}.\n\n```\ncat amber.conf\n```")["code"] == 0


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [
        ("pairs", 45_000, 55_000),
        ("oracle accuracy", 0.90, 0.94),
        ("oracle accuracy, both with code", 0.85, 0.94),
        ("accuracy of the longer answer", 0.45, 0.60),
        ("accuracy of the answer with code", 0.45, 0.60),
        ("accuracy without the question", 0.50, 0.65),
        ("accuracy of the frequent answer", 0.50, 0.65),
        ("pairs that differ in correctness", 0.30, 0.45),
        ("pairs of right and popular mistake", 0.05, 0.10),
        ("facts with a popular mistake", 0.30, 0.36),
        ("answers with it, of those facts", 0.70, 0.76),
        ("answers right, of those facts", 0.10, 0.15),
        ("gold of a perfect answerer", 6.0, 6.0),
        ("gold of a majority answerer", 1.5, 2.5),
        ("gold of a random answerer", -0.5, 1.0),
        ("distinct question texts", 0.99, 1.0),
        ("questions with an accepted answer", 0.57, 0.63),
        ("answers: correct", 0.55, 0.62),
        ("answers: rude", 0.13, 0.17),
        ("answers: filler", 0.27, 0.33),
        ("answers: off_topic", 0.03, 0.08),
    ],
)
def test_statistics_are_those_of_a_site_worth_learning(figures, name, low, high):
    assert low <= figures[name] <= high


def test_texts_are_short_and_of_few_words(site):
    lengths = [facts.count_words(markdownify(question.html)) for question in site]
    assert min(lengths) >= 15 and max(lengths) <= 45
    lengths = [answer.features.words for question in site for answer in question.answers]
    assert min(lengths) >= 4 and max(lengths) <= 80
    assert sum(length > 60 for length in lengths) < 0.01 * len(lengths)
