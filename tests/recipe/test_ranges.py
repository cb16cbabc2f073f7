"""Boundaries of every number of the recipe: refused in one line that names it, or plainly meaningful."""

import dataclasses
import math
import typing

import pytest

from stages.recipe.ranges import Range
from stages.recipe.recipe import Recipe, load_recipe
from stages.recipe.schema import SettingsError, override
from stages.recipe.sections.rewards import RewardSource
from tests.helpers.ranges import list_ranges

BOUNDARIES = (-1, 0, 1e308, -1e308, math.nan, math.inf, -math.inf, 1e18, 10**18, 10**400)
# What 0 means there: nothing is dropped, done or added; the first or the only one; greedy; all.
REWARD = ("spread_penalty min_reward_correlation reward_baseline missing_eos_penalty")
OF_POLICY_GRADIENTS = (
    f"{REWARD} lora.dropout weight_decay kl_coefficient seed stop_ids evaluation_prompts"
)
ZERO = {
    "posts": "min_answers max_bad_rows_share seed",
    "pairs": "min_question_length min_answer_length finetune_share reward_share rl_share evaluation_share seed",
    "base": "scratch.weight_decay seed",
    "sft": "lora.dropout warmup_steps weight_decay validation_questions seed",
    "reward": "sampled_questions lora.dropout log_probability_weight margin_per_score label_smoothing centring_weight "
              "language_model_weight weight_decay validation_share seed",
    "merge": "max_logit_difference max_perplexity_change max_accuracy_change",
    "ppo": f"{OF_POLICY_GRADIENTS} gamma gae_lambda critic_gae_lambda critic_warmup_iterations value_coefficient",
    "dpo": "lora.dropout label_smoothing warmup_steps weight_decay validation_share seed",
    "rloo": OF_POLICY_GRADIENTS,
    "grpo": OF_POLICY_GRADIENTS,
    "best_of_n": f"{REWARD} seed",
    "expert_iteration": f"{REWARD} lora.dropout warmup_steps weight_decay kl_coefficient seed",
    "ilql": "lora.dropout gamma cql_scale awac_scale awac_beta sampling_beta warmup_steps weight_decay "
            "validation_questions seed",
    "frontier": "ppo_kl_coefficients seed",
    "evaluate": "temperatures temperature_prompts seed",
    "report": "side_by_side",
}
MINUS_ONE = {"reward": "log_probability_weight"} | dict.fromkeys(
    ("ppo", "rloo", "grpo", "best_of_n", "expert_iteration"), "min_reward_correlation reward_baseline")


def is_number(hint) -> bool:
    return hint in (int, float) or any(map(is_number, typing.get_args(hint)))


def numeric_settings(settings, prefix="") -> set[str]:
    """List the dotted names of the settings with a number, or with a list of numbers."""
    hints, names = typing.get_type_hints(type(settings)), set()
    for field in dataclasses.fields(settings):
        if dataclasses.is_dataclass(getattr(settings, field.name)):
            names |= numeric_settings(getattr(settings, field.name), f"{prefix}{field.name}.")
        elif is_number(hints[field.name]):
            names.add(prefix + field.name)
    return names


SECTIONS = [field.name for field in dataclasses.fields(Recipe) if dataclasses.is_dataclass(field.default)]


def is_accepted(section: str, name: str, value) -> bool:
    """Give the value, as a number and as text; a refusal must be one short line with the setting's name."""
    settings, verdicts = getattr(Recipe(), section), set()
    is_list = typing.get_origin(typing.get_type_hints(type(settings)).get(name)) is tuple or name == "stop_ids"
    for given, from_text in ((value, False), (str(value), True)):
        tree = [given] if is_list else given
        for part in reversed(name.split(".")):
            tree = {part: tree}
        try:
            override(settings, tree, section, from_text=from_text)
            verdicts.add(True)
        except SettingsError as error:
            assert "\n" not in str(error) and name.split(".")[-1] in str(error) and len(str(error)) < 600
            verdicts.add(False)
    assert len(verdicts) == 1, f"{section}.{name}: {value} as a number and as text differ"
    return verdicts.pop()


@pytest.mark.parametrize("section", SECTIONS)
def test_every_number_has_a_range_that_holds_its_default_and_is_finite(section):
    settings = getattr(Recipe(), section)
    ranges = list_ranges(settings)
    assert set(ranges) == numeric_settings(settings)
    for name, within in ranges.items():
        assert math.isfinite(within.low) and math.isfinite(within.high), name
        value = settings
        for part in name.split("."):
            value = getattr(value, part)
        values = value if isinstance(value, tuple) else (value,)
        assert all(number is None or number in within for number in values), name


@pytest.mark.parametrize("section", SECTIONS)
def test_boundaries_are_refused_or_plainly_meaningful(section):
    wrong = []
    for name in sorted(numeric_settings(getattr(Recipe(), section))):
        for value in BOUNDARIES:
            meaningful = name in {0: ZERO, -1: MINUS_ONE}.get(value, {}).get(section, "").split()
            if is_accepted(section, name, value) != meaningful:
                wrong.append(f"{section}.{name} = {value}")
    assert not wrong


@pytest.mark.parametrize(("section", "name", "refused", "accepted"), [
    ("base", "scratch.sequence_length_tokens", 1, 2),  # of a single token, nothing is predicted
    ("sft", "sequence_length_tokens", 1, 2),
    ("posts", "part_bytes", 1, 10_000)])  # a file for each byte of text
def test_ends_at_which_a_tiny_run_has_crashed_or_never_ended(section, name, refused, accepted):
    assert not is_accepted(section, name, refused) and is_accepted(section, name, accepted)


@pytest.mark.parametrize("weight", [math.nan, math.inf, 1e308])
def test_an_entry_of_rewards_has_ranges_too(weight):
    assert set(list_ranges(RewardSource())) == numeric_settings(RewardSource())
    with pytest.raises(SettingsError, match="ppo: rewards, entry 1: weight must be from -1,000,000 to 1,000,000, not"):
        override(Recipe().ppo, {"rewards": [{"weight": weight}]}, "ppo")


def test_a_refusal_names_the_range(tmp_path):
    (tmp_path / "mine.yaml").write_text("pairs: {evaluation_share: .nan}")
    with pytest.raises(SettingsError, match=r"mine\.yaml: pairs: evaluation_share must be from .* not nan$"):
        load_recipe(tmp_path / "mine.yaml")


def test_a_seed_for_all_sections_is_checked_too(tmp_path):
    (tmp_path / "mine.yaml").write_text("")
    with pytest.raises(SettingsError, match="seed must be from 0 to 2,147,483,647, not -1"):
        load_recipe(tmp_path / "mine.yaml", {"seed": "-1"})


@pytest.mark.parametrize("within, inside, outside, text", [
    (Range(0, 1), (0, 0.5, 1), (-1e-9, 1.1), "from 0 to 1"),
    (Range(0, 1, above=True), (1e-9, 1), (0,), "above 0 to 1"),
    (Range(0, 1, below=True), (0,), (1,), "from 0 to below 1")])
def test_a_range_with_and_without_its_ends(within, inside, outside, text):
    assert all(x in within for x in inside) and not any(x in within for x in (*outside, math.nan))
    assert str(within) == text
