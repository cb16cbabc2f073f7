"""Variants of the frontier: their names, settings and words for a command line."""

import pytest

from stages.recipe.recipe import Recipe, load_recipe, section_settings
from stages.recipe.schema import SettingsError, nest, override, to_dict
from stages.recipe.sections.evaluate import Frontier
from stages.recipe.variants import (
    LENGTH_CONTROL,
    evaluation_overrides,
    format_options,
    list_variants,
    overrides_of_folder,
    variant_settings,
)


def test_every_training_of_the_frontier_is_listed_once_under_a_name_without_a_dot():
    names = [variant.name for variant in list_variants(Frontier())]
    assert names == ["ppo-kl-0_03", "ppo-kl-0_1", "ppo-kl-0_3", "ppo-kl-1", "rloo", "grpo", "dpo-beta-0_03",
                     "dpo-beta-0_1", "dpo-beta-0_3", "expert_iteration", "ilql"]
    assert [variant.name for variant in list_variants(Frontier(algorithms=("ppo",), ppo_kl_coefficients=(1e-5, 1e6)))
            ] == ["ppo-kl-1e-05", "ppo-kl-1e06"]


def test_a_variant_of_ppo_has_a_fixed_kl_coefficient_and_else_the_recipes_settings():
    recipe = load_recipe("tiny")
    variant = list_variants(Frontier())[0]
    settings = variant_settings(recipe, variant.section, variant.overrides)
    assert settings == section_settings(recipe, "ppo") | {"kl_coefficient": 0.03, "kl_target_nats": None}


@pytest.mark.parametrize(("section", "overrides"), [
    ("ppo", list_variants(Frontier())[1].overrides), ("evaluate", evaluation_overrides(Frontier())),
    ("ppo", LENGTH_CONTROL.overrides)])
def test_the_words_of_a_command_line_give_the_same_settings(section, overrides):
    """As command.py reads them: text by option."""
    words = format_options(overrides)
    text = {option.removeprefix("--").replace("-", "_"): value
            for option, value in zip(words[::2], words[1::2], strict=True)}
    settings = getattr(Recipe(), section)
    assert override(settings, nest(text), "command line", from_text=True) == override(settings, overrides, "x")


def test_the_overrides_of_a_folder_are_plain_values_as_in_a_manifest():
    frontier = to_dict(Frontier(prompts=7))
    evaluate = overrides_of_folder("evaluate", frontier)
    assert evaluate["prompts"] == 7
    assert evaluate["best_of"] == [2, 4, 8, 16, 32, 64]
    settings = section_settings(Recipe(), "evaluate")
    assert settings | evaluate == variant_settings(Recipe(), "evaluate", evaluation_overrides(Frontier(prompts=7)))
    assert overrides_of_folder("rloo", frontier) == {}
    assert overrides_of_folder("page", frontier) == {}


def test_the_control_of_ppo_is_paid_for_length_alone_and_is_off_unless_wanted():
    recipe, control = load_recipe("demo"), LENGTH_CONTROL
    assert not recipe.evaluate.length_control
    wanted = override(recipe, {"evaluate": {"length_control": True}}, "x")
    assert control.folder(wanted) == "frontier/ppo-length"
    assert control.further_inputs("results/x") == {"match": "results/x/ppo/manifest.json"}
    settings, own = variant_settings(wanted, "ppo", control.overrides), section_settings(wanted, "ppo")
    assert [source["source"] for source in settings["rewards"]] == ["response_tokens"]
    assert {name for name in own if settings[name] != own[name]} == {
        "rewards", "reward_scaling", "evaluate_every_iterations"}
    assert own | overrides_of_folder(control.name, to_dict(Frontier())) == settings
    assert section_settings(recipe, "evaluate") == {
        name: value for name, value in section_settings(wanted, "evaluate").items() if name != "length_control"}


def test_a_value_given_twice_is_refused():
    with pytest.raises(SettingsError, match="dpo_betas must have nothing twice"):
        override(Frontier(), {"dpo_betas": [0.1, 0.1]}, "recipe")
