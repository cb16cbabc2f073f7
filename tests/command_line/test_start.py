"""The start of a stage's program, before its packages are loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

STAGES = Path(__file__).parents[2] / "stages"


@pytest.mark.parametrize("stage", ["posts", "ppo"])
def test_a_python_without_the_packages_is_told_in_one_line(stage):
    done = subprocess.run([sys.executable, "-S", "-m", f"stages.{stage}", "--help"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{stage}: error: {sys.executable} has no package 'yaml': activate the environment")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("program", ["sft", "inspect", "plan"])
def test_a_program_that_is_run_by_its_path_says_how_to_run_it(tmp_path, program):
    done = subprocess.run([sys.executable, STAGES / f"{program}.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr == f"{program}: error: run it as a module, from {STAGES.parent}: python -m stages.{program}\n"
