"""Signals to Snakemake alone, and to everything at once, reach a stage; its shell and its log outlive it."""

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
STAGE = """
import signal, sys, time
from pathlib import Path

def stop(number, frame):
    time.sleep(0.3)  # the checkpoint
    print("saved", flush=True)
    sys.exit(128 + number)

signal.signal(signal.SIGTERM, stop)
signal.signal(signal.SIGHUP, stop)
signal.signal(signal.SIGINT, stop)
Path("begun").touch()
time.sleep(30)
"""
# As Snakemake: it runs the rule's command in a shell and waits for it.
RUNNER = """
import signal, subprocess, sys
from stages.runs.signals import forward_to_stages

signal.signal(signal.SIGINT, lambda *_: None)
signal.signal(signal.SIGTERM, lambda *_: print("no more jobs", flush=True))
forward_to_stages()
sys.exit(subprocess.Popen(["bash", "-c", sys.argv[1]]).wait())
"""


def shell_command(stage: str) -> str:
    """Build what Snakemake runs for a rule: the prefix, the stage, and its log."""
    snakefile = (ROOT / "Snakefile").read_text()
    (prefix,) = re.findall(r"^shell\.prefix(\(.*?^\))", snakefile, re.DOTALL | re.MULTILINE)
    (end,) = re.findall(r'^LOGGED = " (2>&1 \| .*)"$', snakefile, re.MULTILINE)
    return f"{ast.literal_eval(prefix)}{stage} {end.replace('{log:q}', 'log')}"


@pytest.mark.parametrize(("number", "whole_group"), [
    (signal.SIGTERM, False), (signal.SIGTERM, True), (signal.SIGINT, True), (signal.SIGHUP, False),
    (signal.SIGHUP, True)])
def test_a_stage_saves_its_checkpoint_and_is_waited_for(tmp_path, number, whole_group):
    (tmp_path / "stage.py").write_text(STAGE)
    process = subprocess.Popen(
        [sys.executable, "-c", RUNNER, shell_command(f"{sys.executable} stage.py")], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    wait_until_begun(tmp_path)
    (os.killpg if whole_group else os.kill)(process.pid, number)
    out, _ = process.communicate(timeout=5)
    assert process.returncode == 128 + number and (tmp_path / "log").read_text() == "saved\n"
    assert ("no more jobs" in out) == (number != signal.SIGINT)


def test_ctrl_c_twice_interrupts_snakemake_once(tmp_path):
    """A second exception, while Snakemake ends its jobs after the first, was a hundred stack lines."""
    program = ("import time\nfrom pathlib import Path\nfrom stages.runs.signals import forward_to_stages\n"
               "forward_to_stages()\nPath('begun').touch()\n"
               "try:\n    time.sleep(10)\nexcept KeyboardInterrupt:\n    time.sleep(0.5)\n    print('ended')\n")
    process = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    wait_until_begun(tmp_path)
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.communicate(timeout=5)[0] == "ended\n"


def test_a_hangup_that_is_ignored_stays_ignored(tmp_path):
    """As under nohup: the stage ends by itself, and nobody is told to stop."""
    (tmp_path / "stage.py").write_text("import os, signal, time\nfrom pathlib import Path\n"
                                       "from stages.runtime import stopping\nstopping.install()\n"
                                       "Path('begun').touch()\ntime.sleep(0.5)\nprint('done', flush=True)\n")
    process = subprocess.Popen(
        ["nohup", sys.executable, "-c", RUNNER, shell_command(f"{sys.executable} stage.py")], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        start_new_session=True)
    wait_until_begun(tmp_path)
    os.killpg(process.pid, signal.SIGHUP)
    out, _ = process.communicate(timeout=10)
    assert process.returncode == 0 and out == (tmp_path / "log").read_text() == "done\n"


def wait_until_begun(folder: Path) -> None:
    until = time.monotonic() + 10
    while not (folder / "begun").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


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
