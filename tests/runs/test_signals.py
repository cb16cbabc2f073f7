"""SIGTERM to Snakemake alone, and signals to everything at once, reach a stage; its shell and its log outlive it."""

import ast
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = "\n".join(path.read_text() for path in sorted((ROOT / "workflow/rules").glob("*.smk")))
STAGE = """
import signal, sys, time
from pathlib import Path

def stop(number, frame):
    time.sleep(0.3)  # the checkpoint
    print("saved", flush=True)
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGINT, stop)
Path("begun").touch()
time.sleep(30)
"""
# As Snakemake: it runs the rule's command in a shell and waits for it.
RUNNER = """
import signal, subprocess, sys
from stages.runs.signals import forward_sigterm

signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: print("no more jobs", flush=True))
forward_sigterm()
sys.exit(subprocess.Popen(["bash", "-c", sys.argv[1]]).wait())
"""


def shell_command(stage: str) -> str:
    """Build what Snakemake runs for a rule: the prefix, the stage, and its log."""
    (prefix,) = re.findall(r"^shell\.prefix(\(.*?^\))", (ROOT / "Snakefile").read_text(), re.DOTALL | re.MULTILINE)
    (end,) = set(re.findall(r'" (2>&1 \| .*)"', RULES))
    return f"{ast.literal_eval(prefix)}{stage} {end.replace('{log:q}', 'log')}"


@pytest.mark.parametrize(("number", "whole_group"), [
    (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)])
def test_a_stage_saves_its_checkpoint_and_is_waited_for(tmp_path, number, whole_group):
    (tmp_path / "stage.py").write_text(STAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, shell_command(f"{sys.executable} stage.py")], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    until = time.monotonic() + 10
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + number and (tmp_path / "log").read_text() == "saved\n"
    assert ("no more jobs" in out) == (number == signal.SIGTERM)


@pytest.mark.parametrize(("number", "says"), [(signal.SIGABRT, True), (signal.SIGKILL, True), (signal.SIGTERM, False)])
def test_a_stage_that_memory_has_killed_is_said_in_one_line(tmp_path, number, says):
    done = subprocess.run(["bash", "-c", shell_command(f"sh -c 'kill -{int(number)} $$'")], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 128 + number
    line = f"error: the stage was killed (exit code {128 + number}), as happens when memory runs out: "
    assert done.stderr.splitlines()[-1].startswith(line) if says else "memory" not in done.stderr


def test_a_stage_whose_reader_is_gone_ends(tmp_path):
    """As of `snakemake | head`. What a stage has locked the kernel then unlocks."""
    (tmp_path / "stage.py").write_text("import time\nfor row in range(3000):\n    print(row, flush=True)\n"
                                       "    time.sleep(0.01)\n")
    process = subprocess.Popen(["bash", "-c", shell_command(f"{sys.executable} stage.py")], cwd=tmp_path,
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "0\n"
    process.stdout.close()
    assert process.wait(timeout=20) not in (None, 0)
