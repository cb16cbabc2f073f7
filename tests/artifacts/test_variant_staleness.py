"""Artifacts of the frontier are compared with their own settings, not with the section of the recipe alone."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from stages.artifacts.lineage import diff_from_defaults, find_stale_reasons
from stages.artifacts.manifest import read_record
from stages.recipe.recipe import Recipe, section_settings
from stages.recipe.schema import result_settings, to_dict
from stages.recipe.sections.evaluate import Frontier
from stages.recipe.variants import LENGTH_CONTROL, evaluation_overrides, list_variants, variant_settings

RECIPE = replace(Recipe(), frontier=Frontier(algorithms=("ppo",), ppo_kl_coefficients=(0.03,)))
PPO = list_variants(RECIPE.frontier)[0].overrides


def reasons(run: Path, name: str, section: str, overrides: dict) -> list[str]:
    folder = run / name
    folder.mkdir(parents=True, exist_ok=True)
    settings = variant_settings(RECIPE, section, overrides)
    (folder / "manifest.json").write_text(json.dumps({"stage": section, "config": settings, "inputs": {}}))
    (run / "recipe.yaml").write_text(yaml.safe_dump(to_dict(RECIPE)))
    return find_stale_reasons(read_record(folder))


@pytest.mark.parametrize(("name", "section", "overrides"), [
    ("frontier/ppo-kl-0_03", "ppo", PPO), ("frontier/evaluate", "evaluate", evaluation_overrides(RECIPE.frontier)),
    ("frontier/ppo-length", "ppo", LENGTH_CONTROL.overrides), ("ppo", "ppo", {})])
def test_a_variant_with_its_own_settings_is_up_to_date(tmp_path, name, section, overrides):
    assert reasons(tmp_path, name, section, overrides) == []


@pytest.mark.parametrize(("name", "overrides", "setting"), [
    ("frontier/ppo-kl-0_03", {}, "kl_coefficient"), ("frontier/ppo-kl-0_03", PPO | {"epochs": 9}, "epochs"),
    ("ppo", PPO, "kl_coefficient"), ("other/ppo-kl-0_03", PPO, "kl_coefficient")])
def test_a_variant_with_other_settings_is_stale(tmp_path, name, overrides, setting):
    assert any(f"ppo.{setting} is" in reason for reason in reasons(tmp_path, name, "ppo", overrides))


def test_an_artifact_from_before_a_setting_is_up_to_date_while_its_value_changes_nothing(tmp_path):
    folder = tmp_path / "ppo"
    folder.mkdir()
    manifest = {"stage": "ppo", "config": result_settings(RECIPE.ppo), "inputs": {}}

    def stale_reasons(recipe: Recipe, *absent: str) -> list[str]:
        config = {name: value for name, value in manifest["config"].items() if name not in absent}
        (folder / "manifest.json").write_text(json.dumps(manifest | {"config": config}))
        return find_stale_reasons(read_record(folder), to_dict(recipe))

    assert stale_reasons(RECIPE) == stale_reasons(RECIPE, "prompt_template") == []
    assert diff_from_defaults(read_record(folder)) == []
    older = to_dict(RECIPE)
    del older["ppo"]["prompt_template"]
    assert find_stale_reasons(read_record(folder), older) == [], "recipe.yaml may be from before, too"
    assert "prompt_template" in result_settings(RECIPE.ppo), "the manifest has every setting"
    assert "prompt_template" not in section_settings(RECIPE, "ppo"), "Snakemake compares these with those of before"
    other = replace(RECIPE, ppo=replace(RECIPE.ppo, prompt_template="none"))
    assert stale_reasons(other) == ["ppo.prompt_template is 'question', recipe.yaml says 'none'"]
    assert stale_reasons(other, "prompt_template") == stale_reasons(other)
    assert section_settings(other, "ppo")["prompt_template"] == "none"
    assert stale_reasons(RECIPE, "epochs") == [f"ppo.epochs is 'absent', recipe.yaml says {RECIPE.ppo.epochs}"]


def test_an_artifact_with_a_removed_setting_is_up_to_date_while_its_value_changed_nothing(tmp_path):
    folder, removed = tmp_path / "ppo", {"sampling_engine": "own", "max_sampler_difference_nats": None,
                                         "liger_kernels": "off", "cuda_graphs": False}
    folder.mkdir()

    def stale_reasons(recipe: dict, **settings) -> list[str]:
        manifest = {"stage": "ppo", "config": result_settings(RECIPE.ppo) | removed | settings, "inputs": {}}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        return find_stale_reasons(read_record(folder), recipe)

    recipe = to_dict(RECIPE)
    assert stale_reasons(recipe) == stale_reasons(recipe | {"ppo": recipe["ppo"] | removed}) == []
    assert diff_from_defaults(read_record(folder)) == []
    assert stale_reasons(recipe, cuda_graphs=True) == ["ppo.cuda_graphs is True, recipe.yaml says 'absent'"]
    assert stale_reasons(recipe, epochs=99) == [f"ppo.epochs is 99, recipe.yaml says {RECIPE.ppo.epochs}"]


def test_a_removed_setting_of_a_nested_section_leaves_an_artifact_up_to_date_too(tmp_path):
    folder, config = tmp_path / "base", result_settings(RECIPE.base)
    folder.mkdir()
    older = {"scratch": config["scratch"] | {"initializer_range": 0.05, "warmup_share": 0.05}}
    (folder / "manifest.json").write_text(json.dumps({"stage": "base", "config": config | older, "inputs": {}}))
    assert find_stale_reasons(read_record(folder), to_dict(RECIPE)) == []


def test_a_run_that_is_named_frontier_has_no_variants(tmp_path):
    assert reasons(tmp_path / "frontier", "evaluate", "evaluate", {}) == []
