"""Where the processes of a training stage run: what a rule asks Slurm for, and how its command begins."""

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stages.recipe.algorithms import ALGORITHMS
from stages.recipe.schema import SettingsError
from stages.runs import placement as placements
from stages.runs.placement import GPUS, Placement, parse_placement, share_cores


@pytest.mark.parametrize(("config", "resources", "options"), [
    ({}, {}, []),
    ({"processes": 2}, {}, ["--processes", "2"]),
    ({}, {"gres": "gpu:8"}, ["--processes", "8"]),
    ({}, {"gres": "gpu:a100:4"}, ["--processes", "4"]),
    ({}, {"gres": "gpu:0"}, []),
    ({}, {"gres": "tmpfs:100G"}, []),
    ({"processes": 2}, {"gres": "gpu:8"}, ["--processes", "2"]),
    ({"processes": 1}, {}, ["--processes", "1"]),
    ({"processes": 1}, {"gres": "gpu:8"}, ["--processes", "1"]),
])
def test_one_node_has_a_process_a_gpu_or_as_many_as_config_says(config, resources, options):
    placement = parse_placement(config)
    assert placement.options(None, resources) == options
    assert placement.launcher(None, resources, 16) == "" and placement.resources == {}


def test_several_nodes_start_torchrun_once_each():
    placement = parse_placement({"nodes": 2})
    assert placement.options(None, {"gres": "gpu:8"}) == []
    words = shlex.split(placement.launcher(None, {"gres": "gpu:8"}, 16))
    assert words[:4] == ["srun", "--nodes=2", "--ntasks=2", "--ntasks-per-node=1"] and "--cpus-per-task=16" in words
    assert {"OMP_NUM_THREADS=2", "--nnodes=2", "--nproc-per-node=8", "--no-python"} <= set(words)
    # Slurm's executor writes --ntasks-per-gpu=2 for a job with GPUs and tasks, unless tasks_per_gpu is 0.
    assert placement.resources == {"nodes": 2, "mpi": "srun", "tasks": 2, "tasks_per_gpu": 0}


@pytest.mark.parametrize(("config", "words"), [
    ({"nodes": 0}, "nodes must be a whole number from 1 to 999, not '0'"),
    ({"nodes": "2; rm -r x"}, "nodes must be a whole number"),
    ({"processes": "two"}, "processes must be a whole number from 1 to 999, not 'two'"),
])
def test_other_values_are_refused(config, words):
    with pytest.raises(SettingsError, match=words):
        parse_placement(config)


def test_this_machine_is_one_node():
    with pytest.raises(SettingsError, match="nodes=2 needs Slurm: add --profile profiles/slurm"):
        parse_placement({"nodes": 2}, runs_here=True)
    assert parse_placement({"nodes": 1}, runs_here=True).nodes == 1


def test_a_stage_of_few_threads_has_one_in_each_process():
    assert "OMP_NUM_THREADS=1 " in Placement(nodes=2, processes=4).launcher(None, {}, 2)


class Resources(dict):
    """Of a Snakemake job: names are attributes, too."""

    __getattr__ = dict.__getitem__


def test_slurms_executor_asks_for_the_gpus_of_each_node_and_one_task_a_node():
    submit = pytest.importorskip("snakemake_executor_plugin_slurm.submit_string", reason="make extras")
    placement = parse_placement({"nodes": 2})
    job = SimpleNamespace(resources=Resources({"gres": "gpu:8"} | placement.resources), threads=16)
    facts = dict.fromkeys(("run_uuid", "slurm_logfile", "comment_str", "account", "partition", "workdir"), "")
    words = submit.get_submit_command(job, facts).split()
    assert {"--nodes=2", "--ntasks=2", "--cpus-per-task=16"} <= set(words)
    assert not [word for word in words if word.startswith("--ntasks-per-gpu")]


def test_the_gpus_of_the_profile_are_read_as_the_executor_reads_them():
    """Quoted as other resources are, they would be refused when the job is submitted."""
    profile = yaml.safe_load((Path(__file__).parents[2] / "profiles/slurm/config.yaml").read_text())
    values = dict(entry.split(":gres=") for entry in profile["set-resources"] if ":gres=" in entry)
    assert {"base", "sft", "reward", "judge"} | {f"{name}_train" for name in ALGORITHMS} | {
        algorithm.rule_name("evaluate") for algorithm in ALGORITHMS.values()} == values.keys()
    assert all(GPUS.fullmatch(value) for value in values.values())


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(placements, "DRIVER", tmp_path / "no driver")


def count_threads(folder, cores, processes=None, targets=(), seed=3):
    threads = share_cores(f"{folder}/seed-{{seed}}", cores, processes, lambda: targets)
    return threads["reward"]({"seed": seed}), threads["judge"]({"seed": seed})


@pytest.mark.parametrize(("targets", "threads"), [
    ([], (4, 4)), (["ppo"], (4, 4)), (["reward", "judge"], (4, 4)), (["reward"], (8, 8)), (["judge_merged"], (8, 8)),
    (["reward_merged", "reward"], (8, 8)),
])
def test_reward_model_and_judge_share_the_cores_only_where_both_are_wanted(without_gpu, tmp_path, targets, threads):
    assert count_threads(tmp_path, 8, targets=targets) == threads


@pytest.mark.parametrize(("cores", "processes", "threads"), [
    (1, None, (1, 1)), (2, None, (1, 1)), (3, None, (2, 1)), (2, 2, (2, 2)), (2, 4, (2, 2)),
])
def test_a_share_is_a_thread_for_each_process_at_least(without_gpu, tmp_path, cores, processes, threads):
    assert count_threads(tmp_path, cores, processes) == threads


def test_on_a_gpu_they_train_one_after_the_other(monkeypatch, tmp_path):
    monkeypatch.setattr(placements, "DRIVER", tmp_path)
    assert count_threads(tmp_path, 8) == (8, 8)


def test_the_judge_has_all_cores_once_the_reward_model_is_made(without_gpu, tmp_path):
    made = tmp_path / "seed-3" / "reward" / "manifest.json"
    made.parent.mkdir(parents=True)
    made.write_text("{}")
    assert count_threads(tmp_path, 8) == (4, 8)
    assert count_threads(tmp_path, 8, seed=4) == (4, 4)
