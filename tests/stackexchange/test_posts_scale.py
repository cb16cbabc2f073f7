"""Test posts at scale, on small files: spans, parts, processes, filters, votes, kills and memory."""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from stages.recipe.sections.data import Posts
from stages.stackexchange.dump import xml_table
from stages.stackexchange.dump.scan_log import ScanLog
from stages.stackexchange.dump.xml_table import read_rows
from stages.stackexchange.questions import join, scan, sorted_runs
from stages.stackexchange.questions.table import answer_score
from tests.helpers import stackexchange_dumps
from tests.helpers.stackexchange_dumps import (
    answer,
    document,
    make_posts,
    posts_from_rows,
    qa_rows,
    question,
    read_records,
    row,
    write_dump,
)

ROOT = Path(__file__).parents[2]
SMALL = Posts(part_bytes=20_000)


def file_bytes(posts: Path) -> dict[str, bytes]:
    return {str(p.relative_to(posts)): p.read_bytes() for p in sorted(posts.rglob("*")) if p.is_file()}


def questions_document(numbers: range) -> bytes:
    return document(*(qa_rows(n) for n in numbers))


@pytest.mark.parametrize("span_bytes", [1, 7, 100, 333, 5000])
def test_a_table_can_be_cut_anywhere(tmp_path, monkeypatch, span_bytes):
    """Every row is read once, by one span, at its own offset; bad and overlong rows and comments included."""
    odd = ['  <row Id="7"/><row\nId="8"\n/>\n', question("x"), question(60, Body="y" * 3000), "<!-- <row -->\n"]
    path = Path(write_dump(tmp_path, document(qa_rows(1), *odd, qa_rows(10), qa_rows(20))))
    expected = row_offsets(path, tmp_path, 1 << 30)
    monkeypatch.setattr("stages.stackexchange.dump.xml_table.BLOCK_BYTES", 64)
    assert row_offsets(path, tmp_path, span_bytes) == expected
    assert len(expected[0]) + len(expected[1]) == path.read_bytes().count(b"<row") == 14


def row_offsets(path: Path, folder: Path, span_bytes: int) -> tuple[list, list]:
    offsets, quarantine = [], folder / "quarantine"
    with open(quarantine, "w") as stream:
        reading = ScanLog("x", stream, 2000)
        for span in xml_table.split_spans(path, "posts", "x", span_bytes):
            offsets += [(offset, row.get("Id")) for offset, row in read_rows(path, span, reading)]
    aside = [json.loads(line) for line in quarantine.read_text().splitlines()]
    return offsets, sorted((record["offset"], record["reason"], record["id"]) for record in aside)


def test_a_row_that_is_no_row_of_a_dump_lies_where_it_says(tmp_path):
    path = Path(write_dump(tmp_path, document(qa_rows(1), qa_rows(10))))
    content = path.read_bytes()
    for offset, number in row_offsets(path, tmp_path, 50)[0]:
        assert content[offset:].startswith(f'<row Id="{number}"'.encode())


def test_lines_of_offsets(tmp_path, monkeypatch):
    monkeypatch.setattr(xml_table, "BLOCK_BYTES", 3)
    path = tmp_path / "x"
    path.write_bytes(b"ab\n\ncd\r\ne\n")
    lines = xml_table.LineNumbers(path)
    assert [lines.at(offset) for offset in (0, 2, 3, 4, 8, 8, 10)] == [1, 1, 2, 3, 4, 4, 5]


def test_the_same_bytes_for_any_processes_spans_and_order_of_sources(tmp_path, monkeypatch):
    several = [write_dump(tmp_path, questions_document(range(start, 900, 3)), f"{start}.test/Posts.xml")
               for start in (1, 2)]
    for name, processes in (("a", 1), ("b", 2), ("c", 4)):
        make_posts(tmp_path / name, *several, config=SMALL, processes=processes)
    monkeypatch.setattr(scan, "SPAN_BYTES", 3000)
    monkeypatch.setattr(join, "RANGE_BYTES", 5000)
    make_posts(tmp_path / "d", *reversed(several), config=SMALL)
    expected = file_bytes(tmp_path / "a")
    assert len(expected) > 8 and len(read_records(tmp_path / "a")) == 600
    for name in "bcd":
        assert file_bytes(tmp_path / name) == expected


def test_the_order_is_a_shuffle_by_seed_and_a_part_more_or_less_does_not_show(tmp_path):
    dump = write_dump(tmp_path, questions_document(range(1, 900, 3)))
    ids = {}
    for name, config in (("a", SMALL), ("b", Posts()), ("c", Posts(part_bytes=40_000)), ("d", Posts(seed=1))):
        make_posts(tmp_path / name, dump, config=config)
        ids[name] = [r["question_id"] for r in read_records(tmp_path / name)]
    assert ids["a"] == ids["b"] == ids["c"] != sorted(ids["a"])
    assert ids["d"] != ids["a"] and sorted(ids["d"]) == sorted(ids["a"])


def test_keys_are_splitmix64_and_spread():
    """Steele, Lea, Flood 2014, in plain Python integers."""
    def mix(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)
    salt = int.from_bytes(hashlib.blake2b(b"p\ns", digest_size=8).digest(), "big")
    ids = np.array([0, 1, 5, 2**62, -3])
    assert [int(key) for key in sorted_runs.hash_ids("s", "p", ids)] == [mix((salt + int(i)) % 2**64) for i in ids]
    keys = sorted_runs.hash_ids("s", "p", np.arange(10_000))
    assert len(set(keys.tolist())) == 10_000 and abs(keys.astype(float).mean() / 2**64 - 0.5) < 0.01


@pytest.mark.parametrize("parts", [1, 3, 750])
def test_parts_of_runs_are_all_rows_once_in_ranges_of_keys(tmp_path, parts):
    keys = np.random.default_rng(0).integers(0, 2**64, 600, dtype=np.uint64)
    keys[:4] = 0, 2**64 - 1, 2**63, 2**63
    for number, run_keys in enumerate((keys[:600 // 7], keys[600 // 7:], keys[:0])):
        table = pa.table({"key": run_keys, "n": np.arange(len(run_keys))})
        sorted_runs.write_run(tmp_path / f"{number}", table, ["key"], parts)
    key_arrays = [sorted_runs.read_part([tmp_path / "0", tmp_path / "1", tmp_path / "2"], part)["key"].to_numpy()
             for part in range(parts)]
    assert sorted(np.concatenate(key_arrays).tolist()) == sorted(keys.tolist())
    assert all(key * parts >> 64 == part for part, part_keys in enumerate(key_arrays) for key in part_keys.tolist())
    even = np.unique(keys[keys % 2 == 0])
    half = sorted_runs.read_part([tmp_path / "1"], parts // 2, even)["key"].to_numpy()
    assert half.tolist() == sorted(k for k in keys[600 // 7:].tolist() if k % 2 == 0 and k * parts >> 64 == parts // 2)


SELECTED = {
    "tags": (Posts(tags=("b", "zzz")), {1}, "without one of the tags"),
    "from": (Posts(asked_from="2020-06-01"), {10, 20}, "asked outside the dates"),
    "before": (Posts(asked_before="2020-06-01"), {1}, "asked outside the dates"),
    "answers": (Posts(min_answers=3), {20}, "too few answers"),
    "languages": (Posts(code_languages=("py",)), {1, 10}, "no code in one of the languages"),
}


@pytest.mark.parametrize("config, kept_ids, reason", SELECTED.values(), ids=SELECTED)
def test_selection(tmp_path, config, kept_ids, reason):
    code = '<pre class="{}"><code>x</code></pre>'
    rows = [question(1, Tags="<a><b>", Body=code.format("lang-Py s-code-block")), answer(2, 1), answer(3, 1, 1),
            question(10, Tags="|a|c|", CreationDate="2020-06-01T00:00:00"),
            answer(11, 10, Body='<pre><code class="x language-py">'), answer(12, 10),
            question(20, CreationDate="2021-01-01T00:00:00", Body=code.format("lang-pyx") + "class='lang-py'"),
            *(answer(n, 20) for n in (21, 22, 23))]
    metrics, records = posts_from_rows(tmp_path, *rows, config=config)
    assert {r["question_id"] for r in records} == kept_ids
    sizes = {1: 3, 10: 3, 20: 4}
    dropped_ids = set(sizes) - kept_ids
    assert metrics["dropped"] == {reason: sum(sizes[n] for n in dropped_ids)}
    assert metrics["dropped_questions"] == {reason: len(dropped_ids)}


def test_sites(tmp_path):
    several = [write_dump(tmp_path, questions_document(range(1, 30, 3)), f"{name}.test/Posts.xml") for name in "abc"]
    metrics, _ = make_posts(tmp_path / "posts", *several, config=Posts(sites=("a.test", "c.test")))
    assert set(metrics["sites"]) == {"a.test", "c.test"} and metrics["rows_read"] == 60
    with pytest.raises(ValueError, match=r"none of the sites d\.test is here, but a\.test, b\.test, c\.test"):
        make_posts(tmp_path / "none", *several, config=Posts(sites=("d.test",)))


@pytest.mark.parametrize("processes", [1, 2])
def test_max_questions_keeps_a_sample_and_counts_the_rest(tmp_path, processes):
    dump = write_dump(tmp_path, questions_document(range(1, 900, 3)))
    make_posts(tmp_path / "all", dump, config=SMALL)
    everyone = [r["question_id"] for r in read_records(tmp_path / "all")]
    for limit in (1, 57, 299, 1000):
        out = tmp_path / str(limit)
        config = Posts(part_bytes=20_000, max_questions=limit)
        metrics, _ = make_posts(out, dump, config=config, processes=processes)
        assert [r["question_id"] for r in read_records(out)] == everyone[:limit]
        assert metrics["dropped"].get("over max_questions", 0) == 3 * max(0, 300 - limit)


def test_a_narrow_selection_makes_few_parts(tmp_path):
    rows = [question(n, Tags="<rare>" if n % 180 == 1 else "<a>", Body=f"{n} " * 500) + answer(n + 1, n)
            + answer(n + 2, n) for n in range(1, 900, 3)]
    dump = write_dump(tmp_path, document(*rows))
    files = {}
    for name, tags in (("all", ()), ("rare", ("rare",))):
        make_posts(tmp_path / name, dump, config=Posts(part_bytes=100_000, tags=tags))
        files[name] = [p.name for p in sorted((tmp_path / name).glob("part-*"))]
        assert files[name] == [f"part-{n:05d}.parquet" for n in range(len(files[name]))]
    assert len(read_records(tmp_path / "rare")) == 5 and len(files["all"]) > 3 * len(files["rare"])


def votes(*counts: tuple[int, int, int]) -> bytes:
    rows, number = [], 0
    for post, kind, times in counts:
        for _ in range(times):
            number += 1
            rows.append(row(Id=number, PostId=post, VoteTypeId=kind, CreationDate="2020-01-01"))
    return document(*rows).replace(b"posts>", b"votes>")


@pytest.mark.parametrize("processes, span_bytes", [(1, 1 << 25), (1, 300), (2, 1 << 25)])
def test_up_votes(tmp_path, monkeypatch, processes, span_bytes):
    monkeypatch.setattr(scan, "SPAN_BYTES", span_bytes)
    write_dump(tmp_path, votes((2, 2, 9), (2, 3, 4), (3, 2, 1), (3, 3, 3), (999, 2, 5), (11, 1, 1), (12, 2, 31)),
          "site.test/Votes.xml")
    rows = [question(1), answer(2, 1, 5), answer(3, 1, -2), question(10, AcceptedAnswerId=11), answer(11, 10),
            answer(12, 10, 31)]
    config, dump = Posts(votes="up", part_bytes=600), write_dump(tmp_path, document(*rows))
    metrics, records = make_posts(tmp_path / "posts", dump, config=config, processes=processes)
    answers = {a["id"]: (a["votes"], a["score"]) for r in records for a in r["answers"]}
    assert answers == {2: (9, answer_score(9, False)), 3: (1, -1), 11: (0, 1), 12: (31, 5)}
    assert metrics["rows_read"] == 6


def test_up_votes_need_votes(tmp_path):
    with pytest.raises(ValueError, match=r"votes=up needs the site's Votes\.xml"):
        posts_from_rows(tmp_path, qa_rows(), config=Posts(votes="up"))


def test_up_votes_of_a_real_site_are_net_votes_plus_down_votes(tmp_path):
    """Against plain loops over Votes.xml."""
    folder = stackexchange_dumps.real_dump("coffee.stackexchange.com")
    ups, downs = {}, {}
    for post, kind in re.findall(r'PostId="(\d+)" VoteTypeId="([23])"', (folder / "Votes.xml").read_text("utf-8-sig")):
        counts = ups if kind == "2" else downs
        counts[int(post)] = counts.get(int(post), 0) + 1
    _, net = make_posts(tmp_path / "net", str(folder))
    _, up = make_posts(tmp_path / "up", str(folder), config=Posts(votes="up"))
    pairs = [(a, b) for one, other in zip(net, up, strict=True)
             for a, b in zip(one["answers"], other["answers"], strict=True)]
    assert len(pairs) > 100
    assert all(other["votes"] == ups.get(other["id"], 0) for _, other in pairs)
    agree = sum(one["votes"] == other["votes"] - downs.get(other["id"], 0) for one, other in pairs)
    assert agree >= 0.97 * len(pairs)


def test_a_question_over_the_limit_goes_alone(tmp_path):
    huge = [question(10), *(answer(n, 10, Body="x" * 4000) for n in range(11, 31))]
    config = Posts(max_question_bytes=50_000, part_bytes=20_000)
    metrics, records = posts_from_rows(tmp_path, qa_rows(1), *huge, qa_rows(40), config=config)
    assert {r["question_id"] for r in records} == {1, 40} and metrics["dropped"] == {"over max_question_bytes": 21}


def test_many_answers_to_one_question(tmp_path):
    crowded = [question(1), *(answer(n, 1, n % 50) for n in range(2, 10_002))]
    _, [record] = posts_from_rows(tmp_path, *crowded)
    assert len(record["answers"]) == 10_000


def test_killed_at_the_very_end_it_is_told_again(tmp_path):
    dump, out = write_dump(tmp_path, questions_document(range(1, 90, 3))), tmp_path / "posts"
    metrics, _ = make_posts(out, dump)
    before = file_bytes(out)
    (out / "scratch").mkdir()
    (out / "scratch/done-00000.json").write_text("half of it is gone")
    assert make_posts(out, dump)[0] == metrics and file_bytes(out) == before


def test_lines_of_bad_rows_in_many_spans_and_sites(tmp_path, monkeypatch):
    monkeypatch.setattr(scan, "SPAN_BYTES", 100)
    bad = {f"{name}.test": document(qa_rows(1), question("x"), qa_rows(10), question(f"y{name}"), qa_rows(20))
           for name in "ab"}
    dump = [write_dump(tmp_path, content, f"{site}/Posts.xml") for site, content in bad.items()]
    make_posts(tmp_path / "posts", *dump)
    quarantined = [json.loads(line) for line in (tmp_path / "posts/quarantine.jsonl").read_text().splitlines()]
    assert [(r["id"], r["line"]) for r in quarantined] == [("x", 6), ("ya", 10), ("x", 6), ("yb", 10)]
    for record, content in zip(quarantined, [bad["a.test"]] * 2 + [bad["b.test"]] * 2, strict=True):
        assert content[record["offset"]:].startswith(f'<row Id="{record["id"]}"'.encode())


def run_with_kills(command: list[str], folder: Path) -> tuple[dict, dict]:
    """(artifact of one run, artifact after kill -9 of the whole group at several moments and one run to the end)."""
    start = time.monotonic()
    subprocess.run([*command, "--out", str(folder / "whole")], cwd=ROOT, check=True, capture_output=True)
    seconds, kills = time.monotonic() - start, 0
    for share in (0.3, 0.4, 0.5, 0.6, 0.6, 0.6):
        begun = subprocess.Popen([*command, "--out", str(folder / "killed")], cwd=ROOT, start_new_session=True,
                                 stderr=subprocess.DEVNULL)
        time.sleep(share * seconds)
        os.killpg(begun.pid, signal.SIGKILL)
        kills += begun.wait() == -signal.SIGKILL
    assert kills >= 2, "it was done before it was killed"
    subprocess.run([*command, "--out", str(folder / "killed")], cwd=ROOT, check=True, capture_output=True)
    assert not [p for p in folder.iterdir() if "partial" in p.name or "set-aside" in p.name]
    return file_bytes(folder / "whole"), file_bytes(folder / "killed")


def test_posts_killed_again_and_again_come_out_the_same(tmp_path):
    dump = write_dump(tmp_path, questions_document(range(1, 30_000, 3)))
    command = [sys.executable, "-c", SMALL_SPANS, "--recipe", str(ROOT / "configs/stackllama.yaml"), "--dump", dump,
               "--part-bytes", "200000", "--processes", "2"]
    one, other = run_with_kills(command, tmp_path)
    assert one.keys() == other.keys() and len([name for name in one if name.startswith("part-")]) > 10
    assert all(one[name] == other[name] for name in one if not name.endswith("manifest.json"))


def test_pairs_killed_again_and_again_come_out_the_same(tmp_path):
    dump = write_dump(tmp_path, questions_document(range(1, 12_000, 3)))
    make_posts(tmp_path / "posts", dump, config=Posts(part_bytes=100_000))
    command = [sys.executable, "-m", "stages.pairs", "--recipe", str(ROOT / "configs/stackllama.yaml"), "--posts",
               str(tmp_path / "posts"), "--processes", "2"]
    one, other = run_with_kills(command, tmp_path)
    assert one.keys() == other.keys() and len([name for name in one if name.startswith("reward/")]) > 10
    assert all(one[name] == other[name] for name in one if not name.endswith("manifest.json"))


SMALL_SPANS = """
import sys
sys.argv[0] = "posts"
from stages import posts
from stages.stackexchange.questions import scan
scan.SPAN_BYTES = 150_000
from stages.command_line.start import main
if __name__ == "__main__":
    main(posts.__file__)
"""
MEASURE = """
import resource, sys
from pathlib import Path
from stages import posts
from stages.recipe.sections.data import Posts
from stages.stackexchange.questions import join, scan
scan.SPAN_BYTES = join.RANGE_BYTES = 4 << 20
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
posts.run(Posts(part_bytes=8 << 20), Path(sys.argv[2]), dump=[sys.argv[1]])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024)
"""


def test_memory_does_not_grow_with_the_dump(tmp_path):
    """60 MB of posts in spans of 4 MB: what is added to the bare process stays below the file's size."""
    body = "<p>" + "some text " * 400
    path = tmp_path / "site.test/Posts.xml"
    path.parent.mkdir()
    with open(path, "wb") as stream:
        stream.write(b"<posts>\n")
        for number in range(1, 15_000, 3):
            answers = (answer(number + more, number, Body=body) for more in (1, 2))
            stream.write("".join([question(number, Body=body), *answers]).encode())
        stream.write(b"</posts>\n")
    assert path.stat().st_size > 60e6
    (tmp_path / "out").mkdir()
    result = subprocess.run([sys.executable, "-c", MEASURE, str(path), str(tmp_path / "out")], capture_output=True,
                          text=True, check=True, cwd=ROOT)
    assert float(result.stdout) < 60, f"{result.stdout} MiB"
