"""Test the data benchmarks: the synthetic dump, the usual way, costs, goals and tables."""

import json
from argparse import Namespace

import pytest
from lxml import etree

from benchmarks.common.process_cost import measured
from benchmarks.common.tables import Goal, Result, table
from benchmarks.data.run import extrapolate
from benchmarks.data.stage_runs import count_posts, dump, read_metrics, run_stage
from benchmarks.data.synthetic_posts import write_posts_xml

MEGABYTES = 2


@pytest.fixture(scope="module")
def synthetic_dump(tmp_path_factory):
    """A synthetic dump; tests must not change it."""
    return dump(tmp_path_factory.mktemp("synthetic_dump"), MEGABYTES, 0)


@pytest.fixture(scope="module")
def rows(synthetic_dump):
    return [dict(row.attrib) for row in etree.parse(synthetic_dump).getroot()]


def test_seed_decides(synthetic_dump, tmp_path):
    for seed in (0, 1):
        write_posts_xml(tmp_path / str(seed), MEGABYTES, seed)
    assert (tmp_path / "0").read_bytes() == synthetic_dump.read_bytes()
    assert (tmp_path / "1").read_bytes() != synthetic_dump.read_bytes()


def test_size(synthetic_dump, rows):
    assert synthetic_dump.stat().st_size == pytest.approx(MEGABYTES * 1e6, rel=0.02)
    assert synthetic_dump.read_bytes().count(b"\n") == len(rows) + 3
    assert synthetic_dump.stat().st_size / len(rows) == pytest.approx(2090, rel=0.15)


def test_rows_as_in_a_dump(rows):
    numbers, dates = ([row[name] for row in rows] for name in ("Id", "CreationDate"))
    assert [int(number) for number in numbers] == sorted({int(number) for number in numbers})
    assert dates == sorted(dates)
    assert len({row["Body"] for row in rows}) == len(rows)
    questions = {row["Id"]: row for row in rows if row["PostTypeId"] == "1"}
    answers = [row for row in rows if row["PostTypeId"] == "2"]
    assert len(questions) + len(answers) == len(rows)
    assert 1.1 < len(answers) / len(questions) < 1.9
    assert all(numbers.index(row["ParentId"]) < numbers.index(row["Id"]) for row in answers)
    parents = {row["Id"]: row["ParentId"] for row in answers}
    accepted = {row["AcceptedAnswerId"]: number for number, row in questions.items() if "AcceptedAnswerId" in row}
    actual = [parents[answer] == number for answer, number in accepted.items() if answer in parents]
    assert all(actual) and len(actual) > 0.9 * len(accepted)


def test_bodies_are_html(rows):
    html = "".join(row["Body"] for row in rows)
    for tag in ("p", "pre", "code", "ul", "ol", "blockquote", "h2", "a", "img", "table", "hr"):
        assert f"<{tag}" in html
    for row in rows[:50]:
        body = etree.fromstring(f"<div>{row['Body'].replace('&nbsp;', '')}</div>", etree.HTMLParser(recover=False))
        assert len(body.findall(".//p")) >= 1


def test_ours_and_the_usual_way_make_as_many_pairs(synthetic_dump):
    for stage in ("posts", "pairs"):
        run_stage(stage, synthetic_dump, 1)
    out = synthetic_dump.with_name("usual.parquet")
    usual = json.loads(measured("-m", "benchmarks.data.baseline", synthetic_dump, out).stdout)
    pairs = read_metrics(synthetic_dump, "pairs")
    assert read_metrics(synthetic_dump, "posts")["rows_set_aside"] == 0
    assert pairs["pairs"] == usual["pairs"] > 100
    assert not sum(pairs["dropped_pairs"].values())
    assert pairs["conversions"] == count_posts(synthetic_dump.parent / "pairs") < usual["conversions"]


def test_every_process_counts(tmp_path):
    work = "import sys; block = bytearray(b'x' * 150_000_000); [0 for _ in range(5_000_000)]"
    cost = measured("-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {work!r}]); print('done')")
    assert cost.stdout == "done\n"
    assert 150 < cost.peak_mb < 400
    assert 0.05 < cost.cpu <= 2 * cost.wall


def test_a_failed_run_is_not_measured():
    with pytest.raises(SystemExit, match="no such thing"):
        measured("-c", "raise ValueError('no such thing')")


@pytest.mark.parametrize("goal, met", [
    (Goal("ratio", 2.6, at_least=2.5), True), (Goal("ratio", 2.4, at_least=2.5), False),
    (Goal("peak", 600, at_most=600), True), (Goal("one", 1.001, 1, 1), False)])
def test_goals(goal, met):
    assert goal.met == met
    assert goal.row()[-1] == ("met" if met else "MISSED")


def test_table_is_aligned():
    assert table(["run", "MB"], [["a", 1234], ["longer", 0.5]]).splitlines() == [
        "run        MB", "------  -----", "a       1,234", "longer    0.5"]


def test_extrapolation(tmp_path):
    run = {"megabytes": 100, "rows": 60_000, "disk_mb": 100, "artifact_mb": 10}
    runs = [run | {"name": "posts", "cpu": 3.6}, run | {"name": "pairs", "cpu": 36}]
    Result("memory", [], [], [Goal("peak", 1, at_most=2)], runs).write(tmp_path / "memory.json", {})
    actual = extrapolate(Namespace(measured=tmp_path / "memory.json", processes=[2]), tmp_path)
    assert [[row[0], *map(round, row[1:])] for row in actual.rows] == [
        ["posts", 1, 1, 0, 100, 10], ["pairs", 10, 10, 5, 100, 10], ["together", 11, 11, 6, 110, 20]]
    assert "EXTRAPOLATED" in actual.title
