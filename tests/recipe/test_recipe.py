"""Recipes: the published values, every file in configs/, overrides, and that no knob is dead."""

import ast
import dataclasses
import importlib
import inspect
import re
from pathlib import Path

import pytest
import yaml

from stages.recipe import checks
from stages.recipe import recipe as recipes
from stages.recipe.recipe import Recipe, load_recipe, section_settings
from stages.recipe.schema import SettingsError, flatten, to_dict
from stages.recipe.sections.models import Lora
from stages.recipe.sections.rewards import RewardSource
from stages.rewards.reward_functions import LEXICAL, MEASURES, MODEL, load_reward_functions

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "configs").glob("*.yaml"))

# StackLLaMA: blog post, TRL's stack_llama scripts, their README, data set card.
PUBLISHED = {
    "base.model": "huggyllama/llama-7b",
    "pairs.max_pairs_per_question": 10,
    "sft.lora.r": 16, "sft.lora.alpha": 32, "sft.lora.dropout": 0.05, "sft.precision": "int8",
    "sft.sequence_length_tokens": 1024, "sft.max_steps": 5000, "sft.learning_rate": 1e-5, "sft.warmup_steps": 100,
    "sft.weight_decay": 0.05, "sft.packing": "wrapped",
    "reward.lora.r": 8, "reward.lora.alpha": 32, "reward.lora.dropout": 0.1, "reward.precision": "bf16",
    "reward.max_length_tokens": 512, "reward.train_pairs": 100_000, "reward.learning_rate": 2e-5,
    "reward.weight_decay": 0.001, "reward.epochs": 1.0,
    "ppo.lora.r": 16, "ppo.lora.alpha": 32, "ppo.lora.dropout": 0.0, "ppo.precision": "int8",
    "ppo.learning_rate": 1.4e-5, "ppo.epochs": 4, "ppo.max_response_tokens": 128, "ppo.kl_coefficient": 0.2,
    "ppo.kl_target_nats": 6.0, "ppo.kl_horizon_responses": 10_000, "ppo.gamma": 1.0, "ppo.gae_lambda": 0.95,
    "ppo.reward_baseline": 0.0, "ppo.reward_scaling": "none", "ppo.reward_clip": None,
    "ppo.clip_range": 0.2, "ppo.value_clip_range": 0.2, "ppo.value_coefficient": 0.1, "ppo.temperature": 1.0,
}


def test_defaults_are_the_published_values():
    values = {name: value for name, value, _ in flatten(load_recipe(ROOT / "configs/stackllama.yaml"))}
    assert {name: values[name] for name in PUBLISHED} == PUBLISHED


def test_every_value_says_its_meaning():
    for name, _, doc in flatten(Recipe()):
        assert len(doc) > 3, name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_recipe_loads(file):
    assert load_recipe(file).name == file.stem


def test_there_are_recipes():
    assert {"demo", "stackllama", "tiny"} <= {file.stem for file in FILES}


@pytest.fixture
def written(tmp_path):
    def write(text: str) -> Path:
        (tmp_path / "mine.yaml").write_text(text)
        return tmp_path / "mine.yaml"
    return write


def test_a_partial_section_keeps_its_own_default(written):
    recipe = load_recipe(written("reward: {lora: {r: 4}}"))
    assert recipe.reward.lora == Lora(r=4, alpha=32, dropout=0.1)
    assert recipe.sft.lora == Lora(r=16, alpha=32, dropout=0.05)


def test_a_recipe_without_a_name_is_named_after_its_file(written):
    assert load_recipe(written("")).name == "mine"


def test_mistakes_in_a_file_name_it(written, monkeypatch):
    path = written("ppo: {lerning_rate: 0.1}")
    with pytest.raises(SettingsError, match=r"mine\.yaml: ppo: unknown key 'lerning_rate'; did you mean 'learning"):
        load_recipe(path)
    with pytest.raises(SettingsError, match=r"mine\.yaml: ppo: learning_rate must be a number, not '2e-5x'"):
        load_recipe(written("ppo: {learning_rate: 2e-5x}"))
    with pytest.raises(SettingsError, match=r"rollout_prompts \(64\) must be a multiple of minibatch_prompts \(48\)"):
        load_recipe(written("ppo: {minibatch_prompts: 48}"))
    with pytest.raises(SettingsError, match="is not YAML"):
        load_recipe(written("ppo: {"))
    with pytest.raises(SettingsError, match="must map names to values"):
        load_recipe(written("[1, 2]"))
    monkeypatch.chdir(ROOT)
    with pytest.raises(SettingsError, match=r"no recipe at nowhere\.yaml; there are: configs/demo\.yaml"):
        load_recipe("nowhere.yaml")


@pytest.mark.parametrize(("text", "says"), [
    ("ppo: {learning_rate: 5.0e-3}\nseed: 1\nppo: {epochs: 2}\n", "has 'ppo' twice, in lines 1 and 3: give it once"),
    ("ppo:\n  lora:\n    r: 4\n    alpha: 8\n    r: 8\n", "has 'r' twice, in lines 3 and 5"),
    ("sft: {seed: 1, seed: 2}", "has 'seed' twice, in lines 1 and 1"),
    ("evaluate:\n  rewards: [{name: a,\n             name: b}]\n", "has 'name' twice, in lines 2 and 3")])
def test_a_name_that_stands_twice_is_refused_with_both_lines(written, text, says):
    with pytest.raises(SettingsError, match=rf"mine\.yaml {says}"):
        load_recipe(written(text))


def test_names_of_different_sections_and_of_what_an_alias_merges_may_be_the_same(written):
    recipe = load_recipe(written("sft: {lora: &small {r: 4, alpha: 8}}\nppo: {lora: {<<: *small, r: 2}}\n"))
    assert (recipe.sft.lora.r, recipe.ppo.lora.r, recipe.ppo.lora.alpha) == (4, 2, 8)


def test_a_number_with_an_exponent_needs_no_point(written):
    assert load_recipe(written("ppo: {learning_rate: 2e-5}")).ppo.learning_rate == 2e-5


def test_overrides_come_last_and_may_be_text(written):
    recipe = load_recipe(written("ppo: {learning_rate: 0.1, epochs: 2}"), {"ppo": {"learning_rate": "2e-5"}})
    assert (recipe.ppo.learning_rate, recipe.ppo.epochs) == (2e-5, 2)


def test_off_needs_no_quotes(written):
    assert load_recipe(written("cpu_kernels: off\nppo: {cpu_kernels: auto}")).sft.cpu_kernels == "off"


@pytest.mark.parametrize("day", ["2015-01-31", '"2015-01-31"'])
def test_days_with_and_without_quotes(written, day):
    assert load_recipe(written(f"posts: {{asked_from: {day}}}")).posts.asked_from == "2015-01-31"
    for bad in ("2015", "2015-1-31", '"20150131"', '"2015-02-30"', "soon"):
        with pytest.raises(SettingsError, match="asked_before must be"):
            load_recipe(written(f"posts: {{asked_before: {bad}}}"))


@pytest.mark.parametrize("section, message", [
    ("ppo: {rewards: []}", "ppo: rewards must name at least one source, and none twice, not nothing"),
    ("ppo: {rewards: [{}, {weight: 2}]}", "none twice, not model, model"),
    ("ppo: {rewards: [{source: has_code}], reward_scaling: model}", "needs the reward model among rewards"),
    ("ppo: {rewards: [{template: 'Q: {question}'}]}", "rewards, entry 1: template must contain {response}"),
    ("reward: {lexical_buckets: 512}", "unknown key 'lexical_buckets': it was removed; word counts are a baseline"),
    ("grpo: {sampling_engine: vllm}", "grpo: unknown key 'sampling_engine': it was removed; leave it out, docs/gpu.md"),
    ("ppo: {top_k: 50}", "ppo: unknown key 'top_k': it was removed; no recipe set it, and no measurement was about it"),
    ("best_of_n: {short_response_tokens: 8}", "it was removed; add a function or the measure response_tokens"),
    ("ppo: {response_length: fixed}", "response_length must be one of 'until_stop', 'sampled', not 'fixed'"),
    ("cuda_graphs: true", "mine.yaml: unknown key 'cuda_graphs': it was removed; leave it out, docs/gpu.md says"),
    ("ppo: {score_length: false}", "it was removed; give the reward model sampled pairs"),
    ("ppo: {spread_penalty: 0.5}", "spread_penalty is the coefficient of reward_combine 'mean_minus_std'"),
    ("ppo: {rewards: [{sauce: model}]}", "rewards, entry 1: unknown key 'sauce'; did you mean 'source'"),
    ("pairs: {min_score_gap: 0}", "min_score_gap must be from 1 to"),
    ("pairs: {finetune_share: 0, reward_share: 0, rl_share: 0, evaluation_share: 0}", "are all 0"),
    ("ppo: {response_length: sampled, max_response_tokens: 8}", r"min_response_tokens \(32\) must be at most max"),
    ("base: {scratch: {heads: 3}}", r"hidden_size \(128\) must be a multiple of heads \(3\)"),
    ("base: {scratch: {heads: 128}}", "hidden_size / heads must be even"),
    ("base: {scratch: {sequence_length_tokens: 2048}}", "must be at most max_position_tokens"),
    ("pairs: {length_unit: tokens}", "length_unit tokens needs a tokenizer"),
    ("evaluate: {best_of: [1, 2]}", "best_of must be from 2 to 100,000, not 1"),
    ("evaluate: {best_of: [4, 4]}", "best_of must have no number twice"),
    ("evaluate: {scorers: [model]}", "scorers must not name the reward model"),
    ("posts: {max_questions: 0}", "max_questions must be from 1 to")])
def test_settings_that_cannot_be(written, section, message):
    with pytest.raises(SettingsError, match=message):
        load_recipe(written(section))


def test_a_recipe_of_an_older_run_may_have_removed_settings_at_what_they_were_by_default(written):
    older = "ppo: {sampling_engine: own, max_sampler_difference_nats: null, cuda_graphs: false, liger_kernels: 'off'}"
    assert load_recipe(written(older)) == load_recipe(written(""))


def test_rewards_from_a_file_and_from_snakemake(written):
    path = written("ppo: {rewards: [{source: model, weight: 0.5}, {source: 'mine.rules:short', reads: ids}]}")
    assert [(r.source, r.weight, r.reads) for r in load_recipe(path).ppo.rewards] == [
        ("model", 0.5, "text"), ("mine.rules:short", 1.0, "ids")]
    handed = load_recipe(path, {"ppo": {"rewards": [{"source": "has_code", "weight": "-1e-1"}]}})  # values as text
    assert handed.ppo.rewards == (RewardSource("has_code", -0.1),)


def test_one_seed_for_every_section_that_has_one(written):
    recipe = load_recipe(written("seed: 7\nppo: {seed: 9}"))
    assert (recipe.pairs.seed, recipe.sft.seed, recipe.ppo.seed) == (7, 7, 9)
    assert load_recipe(written("seed: 7"), {"seed": "3"}).sft.seed == 3
    with pytest.raises(SettingsError, match="seed must be a whole number"):
        load_recipe(written("seed: x"))


def test_a_resolved_recipe_loads_as_itself(tmp_path):
    recipe = load_recipe(ROOT / "configs/stackllama.yaml", {
        "ppo": {"learning_rate": "1e-7", "rewards": "[{source: 'a.b:c'}]"}, "dump": ["it's here"]})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(to_dict(recipe)))
    assert load_recipe(tmp_path / "recipe.yaml") == recipe


def wired_modules(module) -> list:
    """List a program, and what it imports of the modules that take a section of the recipe (stages/ppo.py).

    The modules that declare sections do not count.
    """
    names = {node.module for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
             if isinstance(node, ast.ImportFrom) and node.module.startswith("stages.")}
    declaring = ("stages.recipe.recipe", "stages.recipe.sections")
    imported = [importlib.import_module(name) for name in sorted(names) if not name.startswith(declaring)]
    wired = [other for other in imported if "from stages.recipe.sections" in Path(other.__file__).read_text()]
    return [module, *(part for other in wired for part in wired_modules(other))]


def read_names(stage: str) -> str:
    """Return a pattern of the settings that a stage reads."""
    return "|".join(map(read_names_of_module, wired_modules(importlib.import_module(f"stages.{stage}"))))


def read_names_of_module(module) -> str:
    """Return a pattern of the settings that a module reads.

    These are the attributes in its source, the fields of a dataclass X in `select_settings(X, ...)` and of
    `TrainerSettings` where a class method is called; `getattr(config, f"{x}_share")` reads every name like it.
    """
    patterns = []
    for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            patterns.append(re.escape(node.attr))
            if ast.unparse(node.value) == "TrainerSettings":
                patterns += [field.name for field in dataclasses.fields(module.TrainerSettings)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "select_settings":
            patterns += [field.name for field in dataclasses.fields(getattr(module, node.args[0].id))]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            parts = getattr(node.args[1], "values", [node.args[1]])
            if any(isinstance(part, ast.Constant) for part in parts):
                patterns.append("".join(re.escape(v.value) if isinstance(v, ast.Constant) else r"\w+" for v in parts))
    return "|".join(patterns)


PASSED_WHOLE = {"lora"}  # lora.add_lora(**vars(config.lora)): an unknown field is a TypeError


@pytest.mark.parametrize("section", [
    f.name for f in dataclasses.fields(Recipe) if f.name not in ("name", "dump", "prompts")])
def test_every_setting_is_read_by_its_stage(section):
    read = re.compile(read_names(section))
    workflow, dead = (ROOT / "Snakefile").read_text(), []  # it may choose which folder a stage is given
    for dotted in (name for name, _, _ in flatten(getattr(Recipe(), section))):
        first, *rest = dotted.split(".")
        if f"RECIPE.{section}.{dotted}" in workflow:
            continue
        needed = [first] if first in PASSED_WHOLE else [first, *rest]
        dead += [dotted] if not all(read.fullmatch(name) for name in needed) else []
    assert not dead, f"settings of {section!r} that stages/{section}.py never reads: {dead}"


def test_every_value_of_a_reward_source_says_its_meaning_and_is_read():
    fields = dataclasses.fields(RewardSource)
    assert {field.name for field in fields} <= set(inspect.signature(load_reward_functions).parameters)  # (**entry)
    assert all(len(field.metadata["doc"]) > 3 for field in fields)
    measures = next(field.metadata["doc"] for field in fields if field.name == "source")
    assert set(checks.REWARD_NAMES) == {MODEL, LEXICAL, *MEASURES}
    assert all(name in measures for name in MEASURES)


def test_sections_are_plain_values():
    lora = {"r": 16, "alpha": 32, "dropout": 0.05, "target_modules": []}
    assert recipes.section_settings(Recipe(), "sft")["lora"] == lora


@pytest.mark.parametrize(("value", "minutes"), [(10, 10.0), ("2.5", 2.5), (None, None), ("null", None)])
def test_the_time_between_checkpoints_is_set_everywhere_and_is_no_part_of_the_result(tmp_path, value, minutes):
    (tmp_path / "x.yaml").write_text("name: x\n")
    recipe, plain = load_recipe(tmp_path / "x.yaml", {"save_every_minutes": value}), load_recipe(tmp_path / "x.yaml")
    names = ("base", "sft", "reward", "ppo", "dpo", "rloo", "grpo", "expert_iteration", "ilql")
    assert {getattr(recipe, name).save_every_minutes for name in names} == {minutes}
    assert all(section_settings(recipe, name) == section_settings(plain, name) for name in names)
