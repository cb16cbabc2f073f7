"""A stage in two processes by its command line: one writes, all learn of a failure, nothing is left behind.

The stage is a small one of its own, and its processes are forks of one that has imported torch; test_resume.py starts
Python's own.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.helpers.library_forks import IMPORT_VARIABLES

ROOT = Path(__file__).parents[2]
STAGE = '''"""A stage that sums rows."""

import os
import sys

sys.executable = os.environ["SHIM"]  # starts the processes

from stages.command_line.start import main

if __name__ == "__main__":
    main(__file__)

import signal
import time
from pathlib import Path

import torch

from stages.distributed import group
from stages.distributed.units import own_units
from stages.recipe.sections.sft import Sft


def run(config: Sft, out: Path, *, base: Path) -> dict[str, float]:
    """Sum the rows of all processes, after what `base` names has happened to the second one."""
    accident = base.read_text()
    before = len(list(out.glob("rank-*")))
    (out / f"rank-{group.rank()}").write_text("")
    print("of rank", group.rank(), file=sys.stderr)
    total = group.sum_tensor(torch.tensor([float(sum(own_units(range(10))))]))
    if group.rank() == 1 and accident == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank() == 1 and accident == "fail":
        raise ValueError("a bad reward")
    if group.rank() == 1 and accident == "hang":
        time.sleep(300)
    if accident == "fail in all":
        raise ValueError("too few rows")
    group.sum_tensor(torch.zeros(1))
    return {"total": float(total), "before": before}
'''


@pytest.fixture
def start(tmp_path, library_forks):
    """Return a function that runs the stage in two processes."""
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes/sft.py").write_text(STAGE)
    shim = str(library_forks.shims / "python")
    (tmp_path / "recipe.yaml").write_text("{}")

    def run(accident: str, *options: str) -> subprocess.CompletedProcess:
        (tmp_path / "base").write_text(accident)
        command = [shim, "-m", "probes.sft", "--recipe", str(tmp_path / "recipe.yaml"), "--base",
                   str(tmp_path / "base"), "--out", str(tmp_path / "out"), *options]
        limit = "6" if accident == "hang" else "20"  # the first process waits so long for one that hangs
        environment = os.environ | IMPORT_VARIABLES | {
            "PYTHONPATH": f"{tmp_path}/probes:{ROOT}", "STAGE_LIMIT_SECONDS": limit, "SHIM": shim}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)

    return run


def check_failure(done: subprocess.CompletedProcess, folder: Path, words: str) -> None:
    """Check that one line says what has happened, that nothing is published and what was written stays."""
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 1 and line.startswith("sft: error: ") and words in line
    assert not (folder / "out").exists() and (folder / "out.partial" / "rank-0").exists()


def test_the_first_process_alone_writes(start, tmp_path):
    done = start("nothing", "--processes", "2")
    assert done.returncode == 0, done.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["metrics"]["total"] == 45 and manifest["processes"] == 2 and list(manifest["files"]) == ["rank-0"]
    assert "of rank 0" in done.stderr and "of rank 1" not in done.stderr
    assert "of rank 1" in (tmp_path / "logs" / "out.rank-1.log").read_text()
    assert not [path.name for path in tmp_path.iterdir() if "partial" in path.name]
    again = start("nothing")  # another number of processes is no other request
    assert again.returncode == 0 and "is already made" in again.stderr
    assert "is already made" in start("nothing", "--processes", "2").stderr


@pytest.mark.parametrize(("accident", "words"), [
    ("hang", "the process of rank 1, one of 2, has ended or does not answer"),
    ("fail", "the process of rank 1 failed: a bad reward"), ("fail in all", "too few rows")])
def test_one_line_says_which_process_failed(start, tmp_path, accident, words):
    check_failure(start(accident, "--processes", "2"), tmp_path, words)


def test_a_killed_process_is_one_line_and_another_number_of_processes_continues(start, tmp_path):
    check_failure(start("kill", "--processes", "2"), tmp_path, "the process of rank 1")
    done = start("kill")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "out" / "manifest.json").read_text())["metrics"]["before"] == 1


def test_no_process_starts_for_a_wrong_input(start, tmp_path):
    done = start("nothing", "--processes", "2", "--base", str(tmp_path / "missing"))
    assert done.returncode == 1 and f"sft: error: there is no {tmp_path}/missing: make it first" in done.stderr
    assert not (tmp_path / "logs").exists() and not (tmp_path / "out.partial").exists()
