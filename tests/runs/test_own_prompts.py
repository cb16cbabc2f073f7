"""Runs on the user's own prompts: what --config takes, and which targets are refused."""

import pytest
import yaml

from stages.recipe.algorithms import list_targets
from stages.recipe.schema import SettingsError
from stages.runs.run_folder import resolve_recipe, start_run
from stages.runs.snakemake_words import check_prompt_targets
from tests.helpers.base_files import write_base

RULES = ["base", "ppo", "rloo", "grpo", "evaluate", "report", "evaluate_grpo", "report_grpo", "evaluate_rloo",
         "report_rloo"]


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_base(tmp_path / "model")
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n')
    (tmp_path / "r.yaml").write_text(yaml.safe_dump({"dump": ["gone"], "ppo": {
        "rewards": [{"source": "response_tokens"}]}}))
    return tmp_path


def test_prompts_take_the_place_of_the_recipes_dump_and_name_the_run(here):
    recipe = resolve_recipe({"recipe": "r.yaml", "base": "model", "prompts": "./p.jsonl"})
    assert (recipe.dump, recipe.prompts, recipe.base.model) == ((), "p.jsonl", "model")
    assert recipe.name.startswith("r-p.jsonl-")
    assert resolve_recipe({"recipe": "r.yaml", "base": {"model": "model"}, "prompts": "p.jsonl"}) == recipe


@pytest.mark.parametrize(("config", "message"), [
    ({"prompts": "gone.jsonl", "base": "model"}, "prompts: there is no 'gone.jsonl'"),
    ({"prompts": "p.jsonl", "base": "scratch"}, "add base=FOLDER-OR-HUB-ID"),
    ({"prompts": "p.jsonl", "base": "model", "dump": "p.jsonl"}, "a dump or prompts, not both"),
    ({"prompts": "p.jsonl", "base": "no such"}, "base: model: there is no folder 'no such'"),
    ({"prompts": "p.jsonl", "base": "model=x"}, "base is a section")])
def test_refusals(here, config, message):
    with pytest.raises(SettingsError, match=message):
        resolve_recipe({"recipe": "r.yaml"} | config)


def test_a_folder_of_other_prompts_is_refused(here):
    config = {"recipe": "r.yaml", "base": "model", "name": "x"}
    start_run(resolve_recipe(config | {"prompts": "p.jsonl"}))
    resolve_recipe(config | {"prompts": "p.jsonl"})
    (here / "q.txt").write_text("x\n")
    with pytest.raises(SettingsError, match=r"results/x holds a run on other prompts \(p.jsonl\)"):
        resolve_recipe(config | {"prompts": "q.txt"})


def test_targets_that_need_pairs_are_refused(here):
    recipe = resolve_recipe({"recipe": "r.yaml", "base": "model", "prompts": "p.jsonl"})
    for target in set(list_targets()) - set(RULES):
        with pytest.raises(SettingsError, match=f"^'{target}' needs pairs of answers"):
            check_prompt_targets(recipe, ["--cores", "1", target], RULES, list_targets())
    for words in ([], ["ppo"], ["base"], ["report"]):
        check_prompt_targets(recipe, words, RULES, list_targets())
    for target in ("grpo", "evaluate_grpo", "report_grpo"):
        with pytest.raises(SettingsError, match=r"grpo.rewards names 'model', which learns from pairs"):
            check_prompt_targets(recipe, [target], RULES, list_targets())
