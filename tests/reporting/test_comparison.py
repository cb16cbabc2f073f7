"""The page that compares runs: what differs, numbers side by side, curves overlaid, and foreign text only as text."""

import csv
import json
import shutil
from html.parser import HTMLParser

import pytest
import yaml

from stages import compare
from stages.reporting import comparison
from stages.reporting.document import FOLDER
from stages.reporting.figures import Pictures
from tests.helpers import finished_run
from tests.helpers.finished_run import EVIL, metrics


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two runs; the second has another learning rate and other curves of PPO, and its policy did not get better."""
    place = tmp_path_factory.mktemp("runs")
    for name, gold in (("a", 0.3), ("b", -0.2)):
        (place / name).mkdir()
        finished_run.artifacts(place / name)
        (place / name / "recipe.yaml").write_text(yaml.safe_dump({"dump": [f"{name}.7z"]}))
        (place / name / "evaluate" / "metrics.json").write_text(json.dumps(metrics(gold=gold)))
        edit(place / name / "evaluate", lambda manifest, gold=gold: manifest | {"metrics": {
            "gold_difference": gold, "gold_difference_low": gold - 0.1, "gold_difference_high": gold + 0.1}})
    edit(place / "b" / "ppo", lambda manifest: manifest | {
        "config": manifest["config"] | {"learning_rate": 0.0456}, "files": {"x": {"sha256": "1"}}})
    return place


@pytest.fixture
def runs(finished, tmp_path):
    return [shutil.copytree(finished / name, tmp_path / name) for name in "ab"]


def edit(artifact, change) -> None:
    path = artifact / "manifest.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


@pytest.fixture
def undrawn(monkeypatch):
    """Spare the drawing, which most tests do not look at."""
    monkeypatch.setattr(comparison, "draw_pictures", lambda _: Pictures(bytes(24), bytes(24), b""))


@pytest.fixture
def only_ppo(monkeypatch):
    """Spare the curves of other stages."""
    read = compare.read_histories
    monkeypatch.setattr(compare, "read_histories", lambda run: {
        name: rows for name, rows in read(run).items() if name == "ppo"})


def page_of(*folders) -> str:
    return compare.render_page(compare.read_runs(list(folders)))


class Reader(HTMLParser):
    """The rows of every table, by the text of their first cell; and the names of all elements."""

    def __init__(self, page: str):
        super().__init__()
        self.rows, self.names, self.handlers, self.inside = [], [], [], False
        self.feed(page)
        self.by_name = {row[0]: row[1:] for row in self.rows}

    def handle_starttag(self, tag, attrs):
        self.names.append(tag)
        self.handlers += [name for name, _ in attrs if name.startswith("on")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def test_settings_numbers_and_artifacts_stand_side_by_side(runs, undrawn, only_ppo):
    page = page_of(*runs)
    seen = Reader(page).by_name
    assert seen["ppo.learning_rate"][:2] == ["0.0123", "0.0456"] and "learning rate" in seen["ppo.learning_rate"][2]
    assert seen["dump"][:2] == ["a.7z", "b.7z"] and "ppo.gamma" not in seen
    assert seen["evaluate: gold difference"] == ["0.3 [0.2, 0.4]", "-0.2 [-0.3, -0.1]", "-0.5"]
    assert seen["reward accuracy"][0] == seen["reward accuracy"][1] == "0.720 [0.700, 0.740]"
    assert seen["gold at best temperature, SFT → PPO"][0].endswith("T 0.1 → 0.3")
    assert seen["ppo"][0] != seen["ppo"][1] and seen["sft"][0] == seen["sft"][1]
    assert "a: PPO made the answers better" in page and "b: Reward hacking by PPO" in page


def test_curves_have_a_line_a_run_on_held_out_questions(runs, undrawn, only_ppo):
    with open(runs[1] / "ppo" / "history.jsonl", "a") as stream:
        stream.write('{"iteration": 9, "validation_kl": 2.5}\n')
    runs_read = [comparison.ComparedRun(label, {}, compare.read_histories(run), None)
                 for label, run in compare.read_runs(runs).items()]
    kl = next(spec for spec in comparison.CURVES["ppo"] if spec.name == "kl")
    assert comparison._overlay(runs_read, "ppo", kl).lines == {"a": [(0, 0.0)], "b": [(0, 0.0), (9, 2.5)]}
    assert page_of(*runs).count("<figure") == 4  # reward, KL, length and entropy have numbers here


def test_the_curves_of_all_runs_are_one_table(runs, capsys):
    odd = runs[1].rename(runs[1].with_name('b, "x"'))
    assert compare.main([str(runs[0]), str(odd), "--csv"]) == 0
    rows = list(csv.reader(capsys.readouterr().out.splitlines()))
    assert rows[0] == ["run", "stage", "step", "metric", "value"] and ["a", "ppo", "1", "entropy", "2.0"] in rows
    assert [row[1:] for row in rows if row[0] == "a"] == [row[1:] for row in rows if row[0] == 'b, "x"']
    with pytest.raises(SystemExit):
        compare.main([str(runs[0]), str(odd), "--csv", "--out", "page.html"])
    assert "not allowed with" in capsys.readouterr().err


def test_foreign_text_is_only_ever_text(runs, tmp_path, only_ppo):
    """A name of a folder, a setting and a site may hold anything; matplotlib must not read mathematics."""
    odd = runs[1].rename(tmp_path / "_$x_{<img src=x onerror=alert(1)>")
    edit(odd / "sft", lambda manifest: manifest | {"config": {EVIL: EVIL}, "commit": EVIL, "device": EVIL})
    page = page_of(runs[0], odd)
    seen = Reader(page)
    assert page.count("<script") == 1 and (FOLDER / "page.js").read_text() in page
    assert not seen.handlers and seen.names.count("img") == page.count("<figure") > 0
    assert "&lt;img src=x onerror=alert(1)&gt;" in page and "url(" not in page and "http:" not in page


def test_unfinished_and_older_runs_are_compared_as_far_as_they_are(runs, capsys, undrawn, only_ppo):
    shutil.rmtree(runs[0] / "evaluate")
    path = runs[1] / "evaluate" / "metrics.json"
    path.write_text(json.dumps({name: value for name, value in metrics().items() if name != "at_best"}))
    page = page_of(*runs)
    assert "None of these runs has been evaluated" in page and "older version" in capsys.readouterr().err
    assert Reader(page).by_name["evaluate"][0] == "–"


@pytest.mark.parametrize("names, said", [
    (["a"], "give 2 to 8 runs"), (["a", "none"], "there is no run"), (["a", "a"], "given twice")])
def test_a_mistake_is_one_line(runs, capsys, tmp_path, names, said):
    out = tmp_path / "page.html"
    assert compare.main([*(str(tmp_path / name) for name in names), "--out", str(out)]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("compare: error: ") and said in errors and errors.count("\n") == 1 and not out.exists()
    assert compare.main([str(runs[0]), str(runs[1]), "--out", str(tmp_path / "page.txt")]) == 1
    assert "ends in .html" in capsys.readouterr().err
