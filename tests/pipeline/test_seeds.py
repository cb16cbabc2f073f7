"""Several seeds as a target: what Snakemake plans, and what a mistake is answered with."""

import re
from pathlib import Path

import pytest

from stages.recipe.algorithms import ALGORITHMS, FIRST
from tests.helpers.snakemake_runs import list_planned_jobs

ROOT = Path(__file__).parents[2]
SIBLINGS = {name: algorithm for name, algorithm in ALGORITHMS.items() if name != FIRST}
LINKS = ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data")
EACH = {"pairs", "base", "sft", "merge sft", "reward", "merge reward", "ppo_train", "merge ppo", "evaluate", "report"}


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """The project by links, with nothing made yet."""
    folder = tmp_path_factory.mktemp("project")
    for name in LINKS:
        (folder / name).symlink_to(ROOT / name)
    (folder / "a dump.xml").write_text("posts")
    return folder


@pytest.fixture(scope="module")
def dry_run(project, snakemake_forks):
    """Return a function that makes a dry run with --config's values, and returns what came of it."""
    return lambda *words, config=(): snakemake_forks.run(
        ["-n", "-p", *words, "--config", "recipe=configs/tiny.yaml", "dump=a dump.xml", "name=x", *config], project)


def list_seeds(text: str) -> dict[str, set[str]]:
    """List the seeds of each planned rule; of a merge, by its stage."""
    seeds = {}
    for rule, facts in re.findall(r"^(?:local)?rule (\w+):\n((?: +.*\n)*)", text, re.MULTILINE):
        stage, seed = (re.findall(rf"\b{name}=(\w+)", "".join(re.findall(r"wildcards: (.*)", facts)))
                       for name in ("stage", "seed"))
        seeds.setdefault(" ".join([rule, *stage]), set()).update(seed)
    return seeds


def test_everything_from_the_split_on_is_made_once_a_seed_and_pooled(dry_run, project):
    outcome = dry_run("--cores", "4", "ppo", config=("seeds=[3, 5]",))
    assert list_seeds(outcome.text) == {rule: {"3", "5"} for rule in EACH} | {
        "posts": set(), "seeds": set(), "ppo": set()}
    for seed in "35":
        run = f"results/x/seed-{seed}"
        for words in (
            f"stages.pairs --recipe {run}/recipe.yaml --posts results/x/posts/manifest.json --out {run}/pairs/manifest",
            f"stages.merge --recipe {run}/recipe.yaml --base {run}/sft-merged/manifest.json --adapter {run}/ppo/manif",
            f"stages.merge --recipe {run}/recipe.yaml --base {run}/base/manifest.json --adapter {run}/sft/manifest.j",
            f"--policy ppo={run}/ppo-merged/manifest.json", f"tee -a {run}/logs/ppo.log"):
            assert words in outcome.text, words
    assert ("stages.pool_seeds --recipe results/x/recipe.yaml --evaluate results/x/seed-3/evaluate/manifest.json "
            "results/x/seed-5/evaluate/manifest.json --out results/x/seeds/manifest.json") in outcome.text
    threads = {rule: int(count) for rule, count in re.findall(
        r"^rule (\w+):\n(?: +.*\n)*? +threads: (\d+)", outcome.text, re.MULTILINE)}
    assert (threads["posts"], threads["sft"], threads["merge"]) == (4, 2, 2)
    assert not (project / "results").exists()


def test_without_seeds_there_is_no_pooling_and_no_folder_of_a_seed(dry_run):
    outcome = dry_run("--cores", "4", "ppo")
    assert list_planned_jobs(outcome.text) == EACH | {"posts", "ppo"} and "seed" not in outcome.text
    assert set(re.findall(r"threads: (\d+)", outcome.text)) == {"4"}


def test_seeds_go_with_shares_processes_and_a_judge(dry_run):
    text = dry_run("--cores", "2", config=("seeds=[3, 5]", "shares=2", "processes=2", "evaluate={train_judge: always}")
                   ).text
    seeds = list_seeds(text)
    assert seeds["pairs_share"] == seeds["judge"] == seeds["merge judge"] == {"3", "5"}
    assert "--shares results/x/seed-3/pairs-shares/1-of-2/manifest.json results/x/seed-3/pairs-shares/2-of-2" in text
    assert re.search(r"stages\.ppo .*seed-3/.*--processes 2", text)
    assert text.count("    threads: 2") == len(re.findall("    threads: ", text)), "one for each process"


def test_a_stage_of_every_seed(dry_run):
    """By --until; a merged model is a target."""
    text = dry_run("--cores", "1", "ppo", "--until", "reward", config=("seeds=[3, 5]",)).text
    assert list_seeds(text) == {"posts": set()} | {
        rule: {"3", "5"} for rule in ("pairs", "base", "sft", "merge sft", "reward")}
    text = dry_run("--cores", "1", "sft_merged", config=("seeds=[3, 5]",)).text
    assert list_seeds(text)["merge sft"] == {"3", "5"} and "reward" not in list_seeds(text)


def test_seeds_of_every_algorithm(dry_run):
    """In one dry run, as each takes a second."""
    seeds = list_seeds(dry_run("--cores", "1", *SIBLINGS, config=("seeds=[3, 5]",)).text)
    for name in SIBLINGS:
        assert seeds[f"{name}_train"] == seeds[f"report_{name}"] == {"3", "5"}
        assert f"seeds_{name}" in seeds
    assert "ppo_train" not in seeds and "seeds" not in seeds


@pytest.mark.parametrize(("words", "config", "says"), [
    ((), ("seeds=3",), "--config: seeds must be a list of 1 to 1,000 whole numbers"),
    ((), ("seeds=[1, 1]",), "--config: seeds must be a list of 1 to 1,000 whole numbers"),
    ((), ("seeds=[1, 2]", "seed=1"), "--config: give seed=N for one run, or seeds=[...] for several, not both"),
    (("sft",), ("seeds=[1, 2]",), "'sft' is made once for each seed, and no target: stop there with --until")])
def test_a_mistake_is_one_line(dry_run, words, config, says):
    outcome = dry_run("--cores", "1", *words, config=config)
    assert outcome.code == 1 and len(outcome.lines) == 1
    assert outcome.lines[0].startswith(f"snakemake: error: {says}")
