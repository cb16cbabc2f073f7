"""A recipe that leaves a later stage without data is refused before the first stage."""

import json
import re
from pathlib import Path

import pytest

from stages.recipe.checks import BASE_SPLITS, SPLITS, check_stage_needs
from stages.recipe.recipe import Recipe, load_recipe
from stages.recipe.schema import SettingsError

ROOT = Path(__file__).parents[2]
ALL = ("posts", "pairs", "base", "sft", "sft-merged", "reward", "reward-merged", "ppo", "ppo-merged", "evaluate",
       "report")


def check(values: dict, *names: str) -> None:
    recipe = load_recipe(ROOT / "configs/demo.yaml", values)
    check_stage_needs(recipe, [Path("results/demo") / name for name in names or ALL])


def test_the_shipped_recipes_lack_nothing():
    for file in sorted((ROOT / "configs").glob("*.yaml")):
        check_stage_needs(load_recipe(file), map(Path, ALL))
    check({"pairs": {"rl_share": 0}}, "posts", "pairs", "base", "sft", "sft-merged", "reward", "judge", "report-dpo")


@pytest.mark.parametrize(("values", "names", "says"), [
    ({"pairs": {"rl_share": 0}}, ALL, "pairs: rl_share is 0, and ppo needs the rl split"),
    ({"pairs": {"evaluation_share": 0}}, ALL, "evaluation_share is 0, and evaluate needs"),
    ({"pairs": {"evaluation_share": 0}}, ["dpo", "evaluate-dpo"], "evaluation_share is 0, and evaluate-dpo needs"),
    ({"pairs": {"rl_share": 0}}, ["frontier/ppo-kl-0.05"], "rl_share is 0, and ppo-kl-0.05 needs"),
    ({"pairs": {"reward_share": 0}}, ["dpo"], "reward_share is 0, and dpo needs the reward split"),
    ({"pairs": {"reward_share": 0}}, ["judge-merged"], "reward_share is 0, and judge-merged needs the reward split"),
    ({"pairs": {"finetune_share": 0}}, ["seed-1/ppo-merged"], "finetune_share is 0, and ppo-merged needs"),
    ({"pairs": dict.fromkeys((f"{split}_share" for split in BASE_SPLITS), 0)}, ["base"], "from scratch has no text"),
    ({"ppo": {"max_prompt_tokens": 6}}, ALL, "ppo: max_prompt_tokens is 6, which leaves no room for a question"),
    ({"evaluate": {"max_prompt_tokens": 1}}, ["evaluate-dpo"], "evaluate: max_prompt_tokens is 1"),
    ({"reward": {"max_length_tokens": 8}}, ["judge"], "reward: max_length_tokens is 8, which leaves no room .*judge")])
def test_what_a_stage_lacks_is_refused(values, names, says):
    with pytest.raises(SettingsError, match=says) as refused:
        check(values, *names)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("config", "values", "says"), [
    ({"model_type": "gpt2", "n_positions": 256}, {}, "sft: texts of 512 tokens, but .* has 256 positions"),
    ({"model_type": "gpt2"}, {"ppo": {"max_response_tokens": 1000}}, "ppo: texts of 1192 tokens, but .* has 1024"),
    ({"model_type": "opt", "max_position_embeddings": 512}, {"reward": {"max_length_tokens": 513}}, "has 512"),
    ({"model_type": "gpt2"}, {"evaluate": {"max_response_tokens": 1020}}, "evaluate: texts of 1027"),
    ({"model_type": "llama", "max_position_embeddings": 16}, {}, None),
    ({"model_type": "gpt2", "n_positions": 600}, {}, None)])
def test_texts_longer_than_a_table_of_positions_are_refused(tmp_path, config, values, says):
    (tmp_path / "config.json").write_text(json.dumps(config))
    values = values | {"base": {"model": str(tmp_path)}}
    if says is None:
        check(values)
    else:
        with pytest.raises(SettingsError, match=says):
            check(values)


def test_the_splits_are_those_that_the_programs_read():
    for stage, split in SPLITS.items():
        named = re.findall(r'^SPLIT\b.* = "(\w+)"', (ROOT / f"stages/{stage}.py").read_text(), re.MULTILINE)
        assert named in ([split], []), stage
    assert set(SPLITS) <= {*vars(Recipe())}


def test_nothing_is_made_of_a_run_that_is_refused(snakemake_forks, tmp_path):
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "a dump.xml").write_text("posts")
    outcome = snakemake_forks.run(["--cores", "1", "ppo", "--config", "recipe=tiny", "dump=a dump.xml", "name=x",
                                   "pairs={evaluation_share: 0}"], tmp_path)
    assert outcome.code == 1 and outcome.lines[-1].startswith("snakemake: error: pairs: evaluation_share is 0, and ")
    assert not (tmp_path / "results").exists() and "Traceback" not in outcome.text
