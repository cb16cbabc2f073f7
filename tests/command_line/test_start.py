"""The start of a stage's program, before its packages are loaded."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("stage", ["posts", "ppo"])
def test_a_python_without_the_packages_is_told_in_one_line(stage):
    done = subprocess.run([sys.executable, "-S", "-m", f"stages.{stage}", "--help"], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{stage}: error: {sys.executable} has no package 'yaml': activate the environment")
    assert done.stderr.count("\n") == 1
