"""The command line of `snakemake plan`."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from stages.recipe.recipe import load_recipe
from stages.runs import console, snakemake_words
from stages.runs.run_folder import SettingsError, resolve_recipe, write_recipe


@pytest.mark.parametrize(("words", "alone"), [
    (["plan"], True), (["plan", "--config", "recipe=stackllama", "devices=8"], True), (["--cores", "1", "plan"], True),
    (["plan", "ppo"], False), (["ppo_train", "plan"], False), (["--config", "name=plan"], False), ([], False)])
def test_plan_alone_is_planned(words, alone):
    assert snakemake_words.plans_only(words) == alone


def test_the_options_of_the_plan_are_taken_out_of_config():
    config = {"devices": 8, "recipe": "tiny", "device_memory_gib": 24, "pairs_artifact": "results/x/pairs"}
    assert snakemake_words.take_options(config) == ["--device-memory-gib=24", "--devices=8", "--pairs=results/x/pairs"]
    assert config == {"recipe": "tiny"}


def test_the_plan_reads_the_resolved_recipe(tmp_path, monkeypatch):
    recipe = load_recipe("configs/stackllama.yaml", {"ppo": {"iterations": 7}})
    monkeypatch.chdir(tmp_path)
    assert load_recipe(write_recipe(Path(".snakemake/plan/recipe.yaml"), recipe)) == recipe


def test_a_plan_needs_no_dump_and_a_run_does(tmp_path):
    config = {"recipe": "configs/stackllama.yaml"}
    assert resolve_recipe(config, plans=True).dump == ()
    with pytest.raises(SettingsError, match="names no dump"):
        resolve_recipe(config)


def test_a_run_starts_its_plan_and_goes_on_without_one(monkeypatch):
    started = []
    monkeypatch.setattr(console.subprocess, "Popen",
                        lambda words, env, **options: started.append((words, env["OMP_NUM_THREADS"])))
    console.start_plan("results/demo", [Path("results/demo/sft"), Path("results/demo/pairs-shares/1-of-2")], 3)
    console.start_plan("results/demo", [Path("results/demo/seed-0/sft")], 3)
    assert [(words[1:], threads) for words, threads in started] == [
        (["-m", "stages.plan", "--recipe", "results/demo/recipe.yaml", "--stages", "sft"], "3")]
    monkeypatch.setattr(console.subprocess, "Popen", Mock(side_effect=OSError("no more processes")))
    console.start_plan("results/demo", [Path("results/demo/sft")], 3)
