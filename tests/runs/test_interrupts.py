"""Ctrl-C while Snakemake reads the workflow."""

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
import os, signal
from stages.runs import interrupts
interrupts.install()
{}
"""


def run(body: str) -> tuple[int, str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM.format(body)], cwd=ROOT, stderr=subprocess.PIPE, text=True,
                          env=os.environ | {"PYTHONPATH": str(ROOT)})
    return done.returncode, done.stderr


def test_an_interrupt_is_one_line():
    code, said = run("os.kill(os.getpid(), signal.SIGINT)")
    assert (code, said) == (-signal.SIGINT, "snakemake: stopped by SIGINT: the same command continues\n")


def test_another_error_keeps_its_traceback():
    code, said = run("raise KeyError('a')")
    assert code == 1 and said.startswith("Traceback") and said.endswith("KeyError: 'a'\n")
