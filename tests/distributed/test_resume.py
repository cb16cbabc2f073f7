"""PPO in two processes, one of them killed, continued by one process: the run that one process computes throughout.

The two processes save by time.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import tiny_models

ROOT = Path(__file__).parents[2]
RECIPE = """
ppo: {precision: fp32, iterations: 8, rollout_prompts: 8, minibatch_prompts: 4, microbatch_prompts: 4, epochs: 2,
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


def start(folder: Path, out: str, processes: int, *settings: str) -> subprocess.Popen:
    named = {"policy": "base", "reward": "base", "pairs": "pairs", "recipe": "recipe.yaml", "out": out}
    flags = [word for name, value in named.items() for word in (f"--{name}", str(folder / value))]
    return subprocess.Popen([sys.executable, "-m", "stages.ppo", *flags, *settings, "--processes", str(processes)],
                            cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True)


def kill_second_process(launcher: subprocess.Popen, checkpoints: Path) -> None:
    """Kill it once there is a checkpoint."""
    while not list(checkpoints.glob("checkpoint-*")):
        assert launcher.poll() is None, launcher.stderr.read()
        time.sleep(0.05)
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)


def read_history(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]


def test_a_killed_run_of_two_processes_is_continued_by_one(inputs):
    alone = start(inputs, "alone", 1)
    assert alone.wait() == 0, alone.stderr.read()
    several = start(inputs, "several", 2, "--save-every-minutes", "1e-9")
    kill_second_process(several, inputs / "several.partial")
    killed = time.monotonic()
    _, said = several.communicate()
    assert several.returncode == 1 and time.monotonic() - killed < ENDS_WITHIN_SECONDS
    (line,) = [line for line in said.splitlines() if "error:" in line]
    assert "the process of rank 1" in line
    again = start(inputs, "several", 1)
    _, said = again.communicate()
    assert again.returncode == 0 and "resumed at iteration" in said, said

    alone, several = inputs / "alone", inputs / "several"
    expected, actual = (load_file(out / "adapter_model.safetensors") for out in (alone, several))
    for name, weight in expected.items():
        assert (actual[name] - weight).norm() <= 1e-5 * weight.norm() + 1e-9, name
    for row, expected_row in zip(read_history(several), read_history(alone), strict=True):
        assert row == pytest.approx(expected_row, rel=1e-3, abs=1e-5)
    answers = [(out / "samples.jsonl").read_text() for out in (alone, several)]
    assert answers[0] == answers[1]
