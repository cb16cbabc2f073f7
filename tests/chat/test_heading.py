"""What the demo page says of its models: read from the run's manifests, and held to the bundled site's own facts."""

import importlib.util
from pathlib import Path

import pytest

from stages.chat.views import SUBJECTS, render_heading
from stages.runtime.files import write_json

DEMO = Path(__file__).parents[2] / "data/demo/facts.py"


def save_manifests(run: Path, pairs: dict, base: dict) -> Path:
    for name, manifest in (("pairs", pairs), ("base", base)):
        (run / name).mkdir(parents=True)
        write_json(run / name / "manifest.json", {"stage": name, **manifest})
    return run


def save_sites(run: Path, sites: dict[str, int], held_out: int = 0, base: str = "scratch") -> Path:
    metrics = {"sites": {site: {"questions": count, "pairs": 3} for site, count in sites.items()},
               "questions_by_split": {"finetune": 1500, "evaluation": held_out}}
    return save_manifests(run, {"metrics": metrics}, {"config": {"model": base}, "metrics": {}})


def test_facts_are_read_from_the_manifests(tmp_path):
    text = render_heading(save_sites(tmp_path, {"a.example": 10, "b.example": 1990}, 500, "org/model"))
    assert "learnt from 1,500 questions of b.example, a.example; 500 more were held out" in text
    assert "base is org/model, which was pretrained" in text and "nothing else" not in text


@pytest.mark.parametrize("damage", ["no run", "{}", "text"])
def test_what_is_not_known_is_not_said(tmp_path, damage):
    if damage != "no run":
        save_manifests(tmp_path, {}, {})
    if damage == "text":
        (tmp_path / "pairs/manifest.json").write_text("{")
    text = render_heading(tmp_path)
    assert "learnt" not in text and "base is" not in text and "on this machine alone" in text


def test_names_in_a_run_are_text(tmp_path):
    text = render_heading(save_sites(tmp_path / "<img>", {"<script>": 3}, 1, "<b>base</b>"))
    assert "<img" not in text and "<script" not in text and "<b>" not in text


def test_many_sites_are_counted(tmp_path):
    text = render_heading(save_sites(tmp_path, {f"s{n}.example": 1 for n in range(5)}))
    assert "5 questions of s0.example, s1.example, s2.example and 2 more sites;" in text


def test_the_bundled_site_is_described_as_it_is(tmp_path):
    spec = importlib.util.spec_from_file_location("demo_facts", DEMO)
    spec.loader.exec_module(demo := importlib.util.module_from_spec(spec))
    text = SUBJECTS["demo.stackexchange.com"]
    assert len(demo.TOOLS) == 12 and all(tool in text for tool in demo.TOOLS)
    assert len(demo.ATTRIBUTES) == 4 and all(attribute.noun in text for attribute in demo.ATTRIBUTES.values())
    assert text in render_heading(save_sites(tmp_path, {"demo.stackexchange.com": 1}))
