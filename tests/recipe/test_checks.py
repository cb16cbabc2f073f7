"""Names in a recipe are looked up before any work: one line for what does not exist, and no import of torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from stages.recipe import checks
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError, override
from stages.runs.run_folder import resolve_recipe

ROOT = Path(__file__).parents[2]
GOOD = "def score(questions, responses):\n    return {}\n"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "my_truth_of_lookups.py").write_text("import my_missing_torch\n" + GOOD)
    (tmp_path / "my_broken_lookups.py").write_text("def score(:\n")
    (tmp_path / "my_raising_lookups.py").write_text("raise RuntimeError('no licence\\nfor this')\n")
    (tmp_path / "my_bound_lookups.py").write_text("score = len\nthree = 3\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "classifier").mkdir()
    (tmp_path / "classifier/config.json").write_text("{}")
    return tmp_path


def complaint(section: str, values: dict, **more) -> str | None:
    settings = override(getattr(Recipe(), section), values, section)
    try:
        checks.check_names(settings, section, **{"runs_here": True} | more)
    except SettingsError as error:
        assert "\n" not in str(error)
        return str(error)
    return None


@pytest.mark.parametrize("gold", ["my_truth_of_lookups:score", "my_bound_lookups:score", None])
def test_a_function_is_looked_up_without_an_import_where_its_source_shows_it(gold):
    assert complaint("evaluate", {"gold": gold}) is None
    assert "my_truth_of_lookups" not in sys.modules


@pytest.mark.parametrize("name, says", [
    ("my_truth_of_lookups:scored", "cannot load 'my_truth_of_lookups:scored': No module named 'my_missing_torch'"),
    ("my_nowhere_lookups:score", "cannot load 'my_nowhere_lookups:score': No module named"),
    ("my_broken_lookups:score", "SyntaxError: "), ("my_raising_lookups:score", "RuntimeError: no licence for this"),
    ("my_bound_lookups:three", "is not a function")])
def test_a_function_that_is_not_there_is_one_line(name, says):
    assert complaint("evaluate", {"gold": name}).startswith("evaluate: gold: ")
    assert says in complaint("evaluate", {"gold": name})
    assert says in complaint("ppo", {"rewards": [{"source": name}]})
    assert says in complaint("evaluate", {"scorers": [name]})


@pytest.mark.parametrize("source", ["model", "has_code", "owner/classifier", "classifier", "my_bound_lookups:score"])
def test_a_reward_source_that_is_there(source):
    assert complaint("ppo", {"rewards": [{"source": source}]}) is None


@pytest.mark.parametrize("source, says", [
    ("has_cod", "rewards: 'has_cod' is no folder, and none of model, lexical, "),
    ("results/other/reward", "rewards: 'results/other/reward' is no folder"),
    ("empty", "rewards: the folder empty has neither scoring.json nor config.json")])
def test_a_reward_source_that_is_not_there(source, says):
    assert says in complaint("ppo", {"rewards": [{"source": source}]})


@pytest.mark.parametrize("section, values", [
    ("base", {"model": "/nowhere/llama"}), ("base", {"model": "./llama"}), ("base", {"model": "a/b/c"}),
    ("pairs", {"length_unit": "tokens", "tokenizer": "~/llama"})])
def test_a_folder_that_is_not_there(section, values):
    assert "there is no folder" in complaint(section, values)


@pytest.mark.parametrize("model", ["scratch", "gpt2", "owner/name", "empty"])
def test_a_model_that_may_be_there(model):
    assert complaint("base", {"model": model}) is None


def test_an_optimizer_that_needs_a_gpu(monkeypatch):
    paged = {"optimizer": "paged_adamw_8bit"}
    monkeypatch.setattr(checks, "_has_gpu", lambda: False)
    assert "needs a CUDA GPU to page from, and there is none here: set it to adamw_8bit" in complaint("ppo", paged)
    assert complaint("ppo", paged, runs_here=False) is None and complaint("ppo", {"optimizer": "adamw_8bit"}) is None
    monkeypatch.setattr(checks, "_has_gpu", lambda: True)
    assert complaint("ppo", paged) is None


def test_a_run_is_refused_before_anything_is_made(folder):
    (folder / "demo.7z").write_text("")
    (folder / "mine.yaml").write_text("dump: [demo.7z]\nevaluate: {gold: 'my_nowhere_lookups:score'}")
    with pytest.raises(SettingsError, match="evaluate: gold: cannot load"):
        resolve_recipe({"recipe": "mine.yaml"})
    assert not (folder / "results").exists()


def test_looking_up_the_bundled_gold_loads_no_torch():
    code = ("import sys; from stages.recipe.recipe import load_recipe; from stages.recipe.checks import check_names; "
            "r = load_recipe('configs/demo.yaml'); check_names(r.evaluate, 'evaluate', runs_here=True); "
            "sys.exit('torch' in sys.modules or 'data.demo.gold' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
