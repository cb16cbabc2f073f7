"""SIGTERM to Snakemake alone, and signals to everything at once, reach a stage; its shell and its log outlive it."""

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


@pytest.mark.parametrize(("number", "whole_group"), [
    (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True)])
def test_a_stage_saves_its_checkpoint_and_is_waited_for(tmp_path, number, whole_group):
    (prefix,) = re.findall(r'shell\.prefix\("(.*)"\)', (ROOT / "Snakefile").read_text())
    (end,) = set(re.findall(r'" (2>&1 \| .*)"', RULES))
    (tmp_path / "stage.py").write_text(STAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, f"{prefix}{sys.executable} stage.py {end.replace('{log:q}', 'log')}"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    until = time.monotonic() + 10
    while not (tmp_path / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + number and (tmp_path / "log").read_text() == "saved\n"
    assert ("no more jobs" in out) == (number == signal.SIGTERM)
