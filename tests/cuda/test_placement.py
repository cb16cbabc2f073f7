"""Every tensor of an iteration and of the losses is where a GPU needs it, found without a GPU."""

import os
import subprocess
import sys
from pathlib import Path


def test_nothing_mixes_devices_and_the_numbers_are_the_cpus(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda.placement_worker", str(tmp_path)], cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        "score equal", "train_reward equal", "train_dpo equal", "train_ilql equal",
        "take_ppo_iteration equal", "take_grpo_iteration equal", "aten.add.Tensor: tensors on the CPU and on the GPU"]
