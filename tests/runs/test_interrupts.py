"""Ctrl-C while Snakemake reads the workflow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal
from stages.runs import signals
signals.report_interrupts()
{}
"""


def run(body: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(body)], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stderr


def test_an_interrupt_is_one_line():
    code, said = run("os.kill(os.getpid(), signal.SIGINT)")
    assert (code, said) == (-signal.SIGINT, "snakemake: stopped by SIGINT: the same command continues\n")


def test_an_interrupt_while_the_profile_is_read_is_one_line():
    """There, what comes after the import that it has interrupted must not need what was to be imported."""
    (code,) = yaml.safe_load((ROOT / "profiles/default/config.yaml").read_text().split("\n?if")[0])["__definitions__"]
    done = subprocess.run([sys.executable, "-c", "import sys\nclass Slow:\n    def __getattr__(self, name):\n        "
                           f"raise KeyboardInterrupt\nsys.modules['stages.runs'] = Slow()\n{code}"],
                          cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "snakemake: stopped by SIGINT: the same command continues\n")


def test_another_error_keeps_its_traceback():
    code, said = run("raise KeyError('a')")
    assert code == 1 and said.startswith("Traceback") and said.endswith("KeyError: 'a'\n")
