"""PPO in two processes, one of them killed, continued by one: the bytes of one process throughout.

The two processes save by time.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import tiny_models

ROOT = Path(__file__).parents[2]
RECIPE = """
ppo: {precision: fp32, iterations: 8, rollout_prompts: 8, rollout_units: 2, minibatch_prompts: 4, microbatch_prompts: 2,
      epochs: 2, forward_prompts: 2,
      max_response_tokens: 8, learning_rate: 1.0e-3, validation_prompts: 8, evaluate_every_iterations: 4,
      save_every_iterations: 8, require_reward: none, reward_scaling: running, critic_warmup_iterations: 2,
      rewards: [{source: response_tokens}]}
"""
ENDS_WITHIN_SECONDS = 120


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    (folder / "recipe.yaml").write_text(RECIPE)
    tiny_models.save_base(folder / "base")
    tiny_models.save_pairs(folder / "pairs")
    return folder


def words_of_stage(folder: Path, out: str) -> list[str]:
    named = {"policy": "base", "reward": "base", "pairs": "pairs", "recipe": "recipe.yaml", "out": out}
    flags = [word for name, value in named.items() for word in (f"--{name}", str(folder / value))]
    return ["stages.ppo", *flags]


def start_two(folder: Path, out: str, *settings: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-m", *words_of_stage(folder, out), *settings, "--processes", "2"],
                            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)


def kill_second_process(launcher: subprocess.Popen, checkpoints: Path) -> None:
    """Kill it once there is a checkpoint."""
    while not list(checkpoints.glob("checkpoint-*")):
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)


def test_a_killed_run_of_two_processes_is_continued_by_one(library_forks, inputs):
    alone = library_forks.run(words_of_stage(inputs, "alone"))
    assert alone.returncode == 0, alone.stderr
    several = start_two(inputs, "several", "--save-every-minutes", "1e-9")
    kill_second_process(several, inputs / "several.partial")
    killed = time.monotonic()
    _, said = several.communicate()
    assert several.returncode == 1 and time.monotonic() - killed < ENDS_WITHIN_SECONDS
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert "the process of rank 1" in line
    again = library_forks.run(words_of_stage(inputs, "several"))
    assert again.returncode == 0 and "resumed at iteration" in again.stderr, again.stderr

    alone, several = inputs / "alone", inputs / "several"
    for name in ("adapter_model.safetensors", "value_head.safetensors", "history.jsonl", "samples.jsonl"):
        assert (several / name).read_bytes() == (alone / name).read_bytes(), name
