"""What the demo page says of its models: read from the run's manifests, and held to the bundled site's own facts."""

import importlib.util
from pathlib import Path

import pytest

from stages.chat.model_background import SUBJECTS, ModelBackground, read_model_background
from stages.chat.views import render_heading
from stages.runtime.files import write_json

DEMO = Path(__file__).parents[2] / "data/demo/facts.py"


def save_manifests(run: Path, pairs: dict, base: dict) -> Path:
    for name, manifest in (("pairs", pairs), ("base", base)):
        (run / name).mkdir(parents=True)
        write_json(run / name / "manifest.json", {"stage": name, **manifest})
    return run


def test_facts_are_read_from_the_manifests(tmp_path):
    sites = {"a.example": {"questions": 10, "pairs": 30}, "b.example": {"questions": 1990, "pairs": 3}}
    metrics = {"sites": sites, "questions_by_split": {"finetune": 1500, "evaluation": 500}}
    run = save_manifests(tmp_path, {"metrics": metrics}, {"config": {"model": "org/model"}, "metrics": {}})
    facts = read_model_background(run)
    assert facts == ModelBackground({"b.example": 1990, "a.example": 10}, 500, "org/model", None)
    text = render_heading("A run", facts)
    assert "learnt from 1,500 questions of b.example, a.example; 500 more were held out" in text
    assert "base is org/model, which was pretrained" in text and "nothing else" not in text


@pytest.mark.parametrize("damage", ["no run", "{}", "text"])
def test_what_is_not_known_is_not_said(tmp_path, damage):
    if damage != "no run":
        save_manifests(tmp_path, {}, {})
    if damage == "text":
        (tmp_path / "pairs/manifest.json").write_text("{")
    assert read_model_background(tmp_path) == ModelBackground()
    text = render_heading("A run", ModelBackground())
    assert "learnt" not in text and "base" not in text and "on this machine alone" in text


def test_names_in_a_run_are_text():
    text = render_heading("<img>", ModelBackground({"<script>": 3}, 1, "<b>base</b>"))
    assert "<img" not in text and "<script" not in text and "<b>" not in text


def test_many_sites_are_counted():
    text = render_heading("A run", ModelBackground({f"s{n}.example": 1 for n in range(5)}))
    assert "5 questions of s0.example, s1.example, s2.example and 2 more sites;" in text


def test_the_bundled_site_is_described_as_it_is():
    spec = importlib.util.spec_from_file_location("demo_facts", DEMO)
    spec.loader.exec_module(demo := importlib.util.module_from_spec(spec))
    text = SUBJECTS["demo.stackexchange.com"]
    assert len(demo.TOOLS) == 12 and all(tool in text for tool in demo.TOOLS)
    assert len(demo.ATTRIBUTES) == 4 and all(attribute.noun in text for attribute in demo.ATTRIBUTES.values())
    assert text in render_heading("A run", ModelBackground({"demo.stackexchange.com": 1}))
