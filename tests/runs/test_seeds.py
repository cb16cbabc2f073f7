"""Several seeds of one recipe: which recipes, folders and cores they get, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stages.artifacts import staleness
from stages.artifacts.run_facts import list_runs
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError
from stages.runs import run_folder, snakemake_words
from stages.runs.console import announce_run
from stages.runs.placement import SeededRuns, find_start_models, parse_seeds
from stages.runtime import stage_lines


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (stage_lines.PLAN, stage_lines.TERMINAL, stage_lines.SCHEDULE):
        monkeypatch.setenv(name, "")  # so that it is removed again after the test
        monkeypatch.delenv(name)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs/demo.yaml").write_text("name: demo\ndump: [dump.7z]\nsft: {seed: 9}\nposts: {seed: 8}\n")
    (tmp_path / "dump.7z").write_text("")
    yield tmp_path
    while run_folder._open_locks:
        run_folder._open_locks.pop().close()


@pytest.mark.parametrize("seeds", ["3", "", "0,1", [], ["1", "1"], ["01", "1"], ["-1"], ["x"], ["1.5"], [["1"]],
                                   {"a": 1}, ["99999999999"], ["2147483648"], [str(i) for i in range(1001)], ["²"]])
def test_what_is_no_list_of_different_seeds_is_refused_with_the_form(seeds):
    with pytest.raises(SettingsError, match=r"seeds must be a list of 1 to 1,000 whole numbers .* as in 'seeds=\[0, 1"):
        parse_seeds({"seeds": seeds})


def test_seeds_are_numbers_or_text_and_not_beside_a_seed():
    assert parse_seeds({"seeds": ["3", 5, "0"]}) == [0, 3, 5] and parse_seeds({}) == []
    with pytest.raises(SettingsError, match="give seed=N for one run, or seeds="):
        parse_seeds({"seeds": [1, 2], "seed": 1})


def test_each_seed_sets_every_section_but_that_of_the_shared_questions(site):
    config = {"seeds": ["4", "6"], "ppo": {"learning_rate": "1e-3"}}
    recipe = run_folder.resolve_recipe(config)
    assert (recipe.name, recipe.sft.seed) == ("demo", 9), "of the run itself, the recipe's own"
    runs = run_folder.resolve_seeds(recipe, config)
    assert list(runs.list_runs()) == [Path("results/demo/seed-4"), Path("results/demo/seed-6")]
    for seed, resolved in zip((4, 6), runs.list_runs().values(), strict=True):
        names = ("pairs", "base", "sft", "reward", "ppo", "evaluate")
        assert {getattr(resolved, name).seed for name in names} == {seed}
        assert resolved.posts == recipe.posts and resolved.posts.seed == 8 and resolved.ppo.learning_rate == 1e-3
        assert resolved.name == f"demo-seed-{seed}", "a recipe.yaml that is used again names a folder of its own"


def test_without_seeds_there_is_one_run_in_its_own_folder(site):
    runs = run_folder.resolve_seeds(run_folder.resolve_recipe({}), {})
    assert (runs.root, runs.folder, runs.list_runs()) == ("results/demo", "results/demo", {})
    assert runs.every("results/demo/a", "b") == ["results/demo/a", "b"]


def test_paths_of_every_seed():
    runs = SeededRuns("results/x", {0: Recipe(), 7: Recipe()})
    assert runs.every(f"{runs.folder}/sft", f"{runs.root}/posts") == [
        "results/x/seed-0/sft", "results/x/seed-7/sft", "results/x/posts"]
    assert runs.pattern == "0|7"
    find = find_start_models({"ppo": f"{runs.folder}/sft-merged/manifest.json", "sft": "a"})
    wildcards = {"stage": "ppo", "seed": "7"}
    assert find(SimpleNamespace(**wildcards, get=wildcards.get)) == "results/x/seed-7/sft-merged/manifest.json"
    assert find(SimpleNamespace(stage="sft", get={}.get)) == "a"


@pytest.mark.parametrize(("seeds", "cores", "processes", "here", "threads"), [
    (0, 16, None, True, 16), (5, 16, None, True, 3), (5, 2, None, True, 1), (2, 8, 3, True, 4), (5, 8, 3, True, 3),
    (5, 2, 3, True, 2), (5, 16, None, False, 16), (5, None, None, True, None)])
def test_seeds_side_by_side_share_the_cores_of_this_machine(seeds, cores, processes, here, threads):
    assert SeededRuns("x", dict.fromkeys(range(seeds), Recipe())).share_cores(cores, processes, here) == threads


def test_a_stage_of_a_seed_is_no_target_but_can_be_stopped_at():
    snakemake_words.check_targets(["-n", "ppo", "--until", "sft"], ["ppo", "sft_merged"], ["sft"])
    with pytest.raises(SettingsError, match="no target: stop there with --until, as in snakemake ppo --until sft"):
        snakemake_words.check_targets(["-n", "sft"], ["ppo", "sft_merged"], ["sft"])


def test_a_run_of_seeds_writes_the_recipe_of_each_and_lists_as_runs(site):
    config = {"seeds": ["4", "6"]}
    recipe = run_folder.resolve_recipe(config)
    run_folder.start_run(recipe, (), run_folder.resolve_seeds(recipe, config).list_runs())
    for seed in (4, 6):
        assert yaml.safe_load(Path(f"results/demo/seed-{seed}/recipe.yaml").read_text())["ppo"]["seed"] == seed
    save_artifact("results/demo/posts", "posts")
    save_artifact("results/demo/seed-4/pairs-shares/1-of-2", "pairs")
    runs = {run["run"]: [stage["name"] for stage in run["stages"]] for run in list_runs(Path("results"))}
    assert runs == {"results/demo": ["posts"], "results/demo/seed-4": ["pairs-shares/1-of-2"]}


def test_the_lines_of_a_run_name_the_seed_and_invent_no_time(site, capsys):
    outputs = [f"results/demo/{name}/manifest.json" for name in (
        "posts", "seed-4/pairs-shares/1-of-2", "seed-4/pairs", "seed-6/pairs", "seed-4/sft", "seeds")]
    announce_run(Recipe(name="demo", dump=("dump.7z",)), "results/demo", outputs, is_local=False)
    assert capsys.readouterr().err == (
        "results/demo: 6 stages to run in seed-4, seed-6: posts, pairs-shares, pairs, sft, seeds; no estimate of the "
        "time\n")
    stage_lines.begin_stage(Path("results/demo/seed-6/pairs"))
    assert capsys.readouterr().err.startswith("[4/6 seed-6] pairs: started at ")
    stage_lines.begin_stage(Path("results/demo/posts"))
    assert capsys.readouterr().err.startswith("[1/6] posts: started at ")


def save_artifact(folder: str, stage: str, **inputs: dict) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    config = {"seed": int(folder.split("seed-")[1].split("/")[0])} if "seed-" in folder else {"seed": 9}
    (Path(folder) / "manifest.json").write_text(json.dumps(
        {"stage": stage, "config": config, "inputs": inputs, "files": {}, "metrics": {}, "seconds": 1}))


def test_an_artifact_of_a_seed_is_compared_with_the_recipe_of_its_seed_alone(site, monkeypatch):
    """Also where the run itself, or other seeds, are made next."""
    compared = {}
    monkeypatch.setattr(staleness, "find_stale_reasons", lambda record, settings: compared.update(
        {str(record.folder.relative_to(site)): settings and settings["sft"]["seed"]}) or [])
    recipe = Recipe(name="demo", dump=("dump.7z",))
    seeded = {Path(f"results/demo/seed-{seed}"): replace(recipe, sft=replace(recipe.sft, seed=seed)) for seed in (4, 6)}
    for run in seeded:
        save_artifact(f"{run}/evaluate", "evaluate")
        (run / "recipe.yaml").write_text("name: x\n")
    save_artifact("results/demo/posts", "posts")
    save_artifact("results/demo/seeds", "pool_seeds", evaluate=[
        {"path": f"{run}/evaluate/manifest.json", "sha256": "0"} for run in seeded])
    staleness.align_times(Path("results/demo"), recipe, seeded)
    assert compared == {"results/demo/posts": 0, "results/demo/seeds": 0, "results/demo/seed-4/evaluate": 4,
                        "results/demo/seed-6/evaluate": 6}
    compared.clear()
    staleness.align_times(Path("results/demo"), recipe)
    assert compared == {"results/demo/posts": 0, "results/demo/seeds": 0, "results/demo/seed-4/evaluate": None,
                        "results/demo/seed-6/evaluate": None}, "None: by its own recipe.yaml"


@pytest.mark.parametrize(("folder", "stage", "evaluation"), [
    ("seeds-dpo", "pool_seeds", "evaluate-dpo"), ("frontier/page", "frontier", "frontier/evaluate")])
def test_a_report_on_other_seeds_is_stale(site, monkeypatch, folder, stage, evaluation):
    monkeypatch.setattr(staleness, "find_stale_reasons", lambda record, settings: [])
    recipe, run = Recipe(name="demo", dump=("dump.7z",)), Path("results/demo")
    save_artifact(f"{run}/{folder}", stage, evaluate=[
        {"path": f"{run}/seed-{seed}/{evaluation}/manifest.json", "sha256": "0"} for seed in (4, 6)])
    seeded = {run / f"seed-{seed}": recipe for seed in (4, 6, 7)}
    assert staleness.align_times(run, recipe, dict(list(seeded.items())[:2])) == []
    assert staleness.align_times(run, recipe, seeded) == [f"{folder}: it is on seed-4, seed-6"]
    assert staleness.align_times(run, recipe) == [], "without seeds, nothing is said of them"
