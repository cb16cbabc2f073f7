"""Algorithms beside PPO as targets: what Snakemake plans for them, on artifacts that nothing but requests has made.

A project with one more algorithm, `extra`, which reads no reward model, shows what an entry of the table brings about.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from stages.recipe.algorithms import ALGORITHMS, FIRST
from tests.helpers.snakemake_runs import SnakemakeForks, list_planned_jobs

ROOT = Path(__file__).parents[2]
SIBLINGS = {name: algorithm for name, algorithm in ALGORITHMS.items() if name != FIRST}
TINY = ("recipe=configs/tiny.yaml", "dump=a dump.xml", "name=tiny")
FROM_SFT = {"posts", "pairs", "base", "sft", "merge sft"}
REWARD, EVALUATED = {"reward", "merge reward"}, {"evaluate_extra", "report_extra", "extra"}
SECTION = '''"""Settings of an algorithm."""
from dataclasses import dataclass
from stages.recipe.schema import setting

@dataclass(frozen=True)
class Extra:
    """An algorithm."""

    beta: float = setting(0.1, "strength")
'''
# Artifacts of every stage, without the work.
MAKE = '''
from dataclasses import replace
from pathlib import Path
from stages.command_line import command
from stages.recipe.recipe import load_recipe
from stages.artifacts.lineage import section_name

RECIPE, RUN = replace(load_recipe("configs/tiny.yaml"), dump=("a dump.xml",)), Path("results/tiny")

def make(stage, name, **inputs):
    def run(config, out, **_):
        for file in ("report.html", "pipeline.png", "evaluate-frontier.png", "evaluate-rewards.png"):
            (out / "figures").mkdir(exist_ok=True)
            (out / ("" if file == "report.html" else "figures") / file).write_text(name)
        return {}
    folders = {key: {name: RUN / folder for name, folder in value.items()} if isinstance(value, dict)
               else [str(RUN / folder) for folder in value] if isinstance(value, list) else RUN / value
               for key, value in inputs.items()}
    section = getattr(RECIPE, section_name(stage))
    dump = {"dump": ["a dump.xml"]} if stage == "posts" else {}
    command._make(stage, lambda: run, section, RUN / name, folders | dump, {}, force=False, verify=False)

make("posts", "posts")
make("pairs", "pairs", posts="posts")
make("base", "base", pairs="pairs")
make("sft", "sft", base="base", pairs="pairs")
make("merge", "sft-merged", base="base", adapter=["sft"], pairs="pairs")
make("reward", "reward", base="sft-merged", pairs="pairs")
make("merge", "reward-merged", base="sft-merged", adapter=["reward"], pairs="pairs")
make("ppo", "ppo", policy="sft-merged", reward="reward-merged", pairs="pairs")
make("extra", "extra", policy="sft-merged", pairs="pairs")
for name, end in (("ppo", ""), ("extra", "-extra")):
    make("merge", name + "-merged", base="sft-merged", adapter=[name], pairs="pairs")
    evaluated = dict(posts="posts", pairs="pairs", base="base")
    make("evaluate", "evaluate" + end, sft="sft-merged", reward="reward-merged", policy={name: name + "-merged"},
         **evaluated)
    make("report", "report" + end, sft="sft", reward="reward", policy={name: name}, evaluate="evaluate" + end,
         merged=[stage + "-merged" for stage in ("sft", "reward", name)], **evaluated)
'''


def write_change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project with one more algorithm, and a finished run of it and of PPO."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("workflow", "profiles", "configs", "stages"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("Snakefile", "environment.yml"):
        shutil.copy(ROOT / name, folder)
    (folder / "data").symlink_to(ROOT / "data")
    (folder / "stages/recipe/sections/extra.py").write_text(SECTION)
    recipe = folder / "stages/recipe/recipe.py"
    field = '    extra: Extra = setting(Extra(), "extra")\n'
    write_change(recipe, "    evaluate: Evaluate", f"{field}    evaluate: Evaluate")
    write_change(recipe, "from stages.recipe.sections.models", "from stages.recipe.sections.extra import Extra\n"
                 "from stages.recipe.sections.models")
    write_change(folder / "stages/recipe/algorithms.py", "for algorithm in (\n",
                 'for algorithm in (\n    Algorithm("extra", "extra", inputs=("policy", "pairs")),\n')
    (folder / "a dump.xml").write_text("posts")
    subprocess.run([sys.executable, "-c", MAKE], cwd=folder, check=True, capture_output=True,
                   env=os.environ | {"PYTHONPATH": str(folder)})
    return folder


@pytest.fixture(scope="module")
def forks(project):
    with SnakemakeForks(project) as forks:
        yield forks


@pytest.fixture(scope="module")
def plan(forks, project):
    """Return a function that lists the jobs of a dry run."""
    def run(*words: str, config: tuple[str, ...] = (), name: str = "tiny") -> set[str]:
        outcome = forks.run(["--cores", "1", "-n", *words, "--config", *TINY, f"name={name}", *config], project)
        assert outcome.code == 0, outcome.text[-3000:]
        return list_planned_jobs(outcome.text)
    return run


def test_a_target_is_the_training_its_merge_evaluation_and_report(plan):
    training = FROM_SFT | {"extra_train"}
    assert plan("extra_train", name="new") == training, "no reward model to train on"
    assert plan("extra_merged", name="new") == training | {"merge extra", "extra_merged"}
    assert plan("extra", name="new") == training | {"merge extra"} | REWARD | EVALUATED
    assert "evaluate" not in plan("extra", name="new") and "extra_train" not in plan("ppo", name="new")


def test_every_algorithm_of_the_table_is_a_target(plan, forks, project):
    """In one dry run, as each takes a second. Without a reward model among its inputs, no training waits for one."""
    text = forks.run(["--cores", "1", "-n", "-p", *SIBLINGS, "--config", *TINY, "name=new"], project).text
    jobs = list_planned_jobs(text)
    assert "ppo_train" not in jobs
    for name, algorithm in SIBLINGS.items():
        assert {f"{name}_train", f"evaluate_{name}", f"report_{name}"} <= jobs
        assert (f"merge {name}" in jobs) == algorithm.trains_model
        (training,) = re.findall(rf"python -m stages\.{name} .*", text)
        assert ("results/new/reward-merged/manifest.json" in training) == ("reward" in algorithm.inputs)
    without = [f"{name}_train" for name, algorithm in SIBLINGS.items() if "reward" not in algorithm.inputs]
    assert without and plan(*without, name="new") == FROM_SFT | set(without)


def test_a_finished_one_is_done(plan):
    assert plan("extra") == plan("ppo") == set()


def test_a_changed_value_reruns_its_algorithm_and_what_follows_and_nothing_of_another(plan):
    changed = ("extra={beta: 0.2}",)
    assert plan("extra", config=changed) == {"extra_train", "merge extra"} | EVALUATED
    assert plan("ppo", config=changed) == set()
    assert plan("ppo", "extra", config=("ppo={learning_rate: 0.5}",)) == {
        "ppo_train", "merge ppo", "evaluate", "report", "ppo"}


def test_a_changed_reward_model_reruns_no_training_that_does_not_read_it(plan):
    assert plan("extra", config=("reward={learning_rate: 0.5}",)) == REWARD | EVALUATED


def test_its_folders_and_its_command_line(forks, project):
    text = forks.run(["--cores", "1", "-n", "-p", "extra", "--config", *TINY, "name=new"], project).text
    run = "results/new"
    for words in (
        f"stages.extra --recipe {run}/recipe.yaml --policy {run}/sft-merged/manifest.json --pairs "
        f"{run}/pairs/manifest.json --out {run}/extra/manifest.json",
        f"--base {run}/sft-merged/manifest.json --adapter {run}/extra/manifest.json",
        f"--policy extra={run}/extra-merged/manifest.json", f"--out {run}/evaluate-extra/manifest.json",
        f"--policy extra={run}/extra/manifest.json", f"{run}/report-extra/figures/pipeline.png"):
        assert words in text


def test_a_target_that_is_nearly_its_name(forks, project):
    outcome = forks.run(["-n", "--cores", "1", "extra-merged", "--config", *TINY], project)
    assert outcome.lines == ["snakemake: error: there is no target 'extra-merged'; did you mean 'extra_merged'?"]
