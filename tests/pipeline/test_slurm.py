"""Stages through Slurm on this machine: scattered pairs, and PPO in two processes that is preempted once.

profiles/slurm/one_node.sh starts it. The stages in between and the artifacts to compare with are made in this process,
since starting torch is most of what a tiny stage costs.
"""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stages import base, merge, pairs, posts, ppo, reward, sft
from stages.command_line.command import make
from stages.recipe.recipe import load_recipe

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "profiles/slurm/one_node.sh"
RUN, ALONE = Path("results/tiny"), Path("alone")
# Still smaller than configs/tiny.yaml, but for PPO: it must not be over when its job is preempted.
CHANGES = {"base": {"scratch": {"max_tokens": 2000}}, "sft": {"max_steps": 2}, "reward": {"train_pairs": 16},
           "ppo": {"iterations": 16, "evaluate_every_iterations": 16}}
CONFIG = ["recipe=configs/tiny.yaml", "dump=dump", "name=tiny", "shares=2",
          *(f"{section}={json.dumps(changes)}" for section, changes in CHANGES.items())]
LIMIT_SECONDS = 1800
# The plugin would ask Slurm for the states of its jobs after 40 s, or 1, 11, 21, ... s: longer than these jobs take.
SNAKEMAKE = """
import asyncio, sys
from snakemake.cli import main
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
RemoteExecutor.sleep = lambda executor: asyncio.sleep(0.5)
sys.argv[0] = "snakemake"
main()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """The environment of a running Slurm."""
    if importlib.util.find_spec("snakemake_executor_plugin_slurm") is None:
        pytest.skip("snakemake-executor-plugin-slurm is not installed: make extras")
    folder = tmp_path_factory.mktemp("slurm")
    started = subprocess.run([SCRIPT, "start", folder], capture_output=True, text=True)
    if started.returncode:
        pytest.skip(f"Slurm does not start here: {started.stderr.strip()}")
    threads = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    yield os.environ | threads | {"SLURM_CONF": f"{folder}/slurm.conf", "PATH": f"{folder}/bin:{os.environ['PATH']}"}
    subprocess.run([SCRIPT, "stop", folder], check=True)


@pytest.fixture(scope="module")
def project(tmp_path_factory, cluster):
    """A copy of the project by links, beside a tiny dump; the working directory."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data"):
        (folder / name).symlink_to(ROOT / name)
    subprocess.run([sys.executable, "data/demo/generate.py", "--questions", "120", "--seed", "1", "--out", "dump"],
                   cwd=folder, check=True)
    before = Path.cwd()
    os.chdir(folder)
    yield folder
    os.chdir(before)


def start(environment: dict, target: str, *config: str) -> subprocess.Popen:
    command = [sys.executable, "-c", SNAKEMAKE, "--profile", "profiles/slurm", "--cores", "2",
               "--slurm-status-command=squeue", target, "--config", *CONFIG, *config]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen) -> None:
    text, _ = process.communicate(timeout=LIMIT_SECONDS)
    logs = [path.read_text() for path in Path(".snakemake/slurm_logs").rglob("*.log")]  # of failed jobs only
    assert process.returncode == 0, "\n".join([text, *logs])[-5000:]


def make_here(run, section: str, out: Path, **inputs) -> None:
    make(run, getattr(load_recipe("configs/tiny.yaml", CHANGES), section), out, inputs)


def manifest(out: Path) -> dict:
    return json.loads((out / "manifest.json").read_text())


def hashes(out: Path) -> dict[str, str]:
    return {name: file["sha256"] for name, file in manifest(out)["files"].items()}


def assert_same_answers(out: Path, expected: Path) -> None:
    """Compare sampled answers, before and after training, and their rewards up to rounding."""
    rows, expected_rows = ([json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
                           for folder in (out, expected))
    assert [row.pop("reward") for row in rows] == pytest.approx([row.pop("reward") for row in expected_rows], abs=1e-4)
    assert rows == expected_rows


def assert_same_weights(out: Path, expected: Path) -> None:
    weights, expected_weights = (load_file(folder / "adapter_model.safetensors") for folder in (out, expected))
    assert weights.keys() == expected_weights.keys()
    for name, weight in expected_weights.items():
        assert (weights[name] - weight).norm() <= 1e-5 * weight.norm() + 1e-9, name


def test_a_run_through_slurm_equals_one_without(cluster, project):
    """One test, as each part needs the ones before it; starting torch is most of its cost."""
    make_here(posts.run, "posts", ALONE / "posts", dump=["dump"])
    make_here(pairs.run, "pairs", ALONE / "pairs", posts=ALONE / "posts")
    finish(start(cluster, "pairs"))
    assert len(list((RUN / "pairs-shares").glob("*-of-2/manifest.json"))) == 2
    assert hashes(RUN / "posts") == hashes(ALONE / "posts") and hashes(RUN / "pairs") == hashes(ALONE / "pairs")

    on_base = {"base": RUN / "base", "pairs": RUN / "pairs"}
    make_here(base.run, "base", RUN / "base", pairs=RUN / "pairs")
    make_here(sft.run, "sft", RUN / "sft", **on_base)
    merged = {"base": RUN / "sft-merged", "pairs": RUN / "pairs"}
    make_here(merge.run, "merge", RUN / "sft-merged", adapter=[str(RUN / "sft/manifest.json")], **on_base)
    make_here(reward.run, "reward", RUN / "reward", **merged)
    make_here(merge.run, "merge", RUN / "reward-merged", adapter=[str(RUN / "reward/manifest.json")], **merged)
    inputs = {"policy": RUN / "sft-merged", "reward": RUN / "reward-merged", "pairs": RUN / "pairs"}
    make_here(ppo.run, "ppo", ALONE / "ppo", **inputs)
    training = start(cluster, "ppo_train", "processes=2")
    preempt(cluster, training)
    finish(training)
    log = (RUN / "logs/ppo.log").read_text()
    assert "resumed at iteration" in log, log
    assert manifest(RUN / "ppo")["processes"] == 2
    assert_same_answers(RUN / "ppo", ALONE / "ppo")
    assert_same_weights(RUN / "ppo", ALONE / "ppo")


def preempt(cluster: dict, training: subprocess.Popen) -> None:
    """Put the job of PPO back into the queue once there is a checkpoint, as Slurm does for one of higher priority."""
    while not list(Path(f"{RUN}/ppo.partial").glob("checkpoint-*/complete.json")):
        assert training.poll() is None, training.communicate()[0]
        time.sleep(0.05)
    (job,) = subprocess.run(["squeue", "--noheader", "--format=%i"], env=cluster, capture_output=True, text=True,
                            check=True).stdout.split()
    subprocess.run(["scontrol", "requeue", job], env=cluster, check=True)


def test_the_script_says_what_is_missing(tmp_path):
    bare = {"PATH": f"{tmp_path}:/usr/bin/nothing"}
    for name in ("bash", "sed", "mkdir"):
        (tmp_path / name).symlink_to(shutil.which(name))
    done = subprocess.run([shutil.which("bash"), SCRIPT, "start", tmp_path / "x"], env=bare, capture_output=True,
                          text=True)
    assert done.returncode == 1 and "apt-get install" in done.stderr
    done = subprocess.run([SCRIPT, "restart", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and "one_node.sh start FOLDER" in done.stderr
