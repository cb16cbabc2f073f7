"""Run many Snakemake command lines: one process imports Snakemake, and forks for each."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.library_forks import IMPORT_VARIABLES

FORKS = """
import json, os, sys
import snakemake.cli
sys.executable = sys.argv[1]  # runs the stages
import stages.runs.console, stages.runs.run_folder, stages.artifacts.staleness  # what the Snakefile needs
snakemake.cli.get_argument_parser()  # finds the plugins
for line in sys.stdin:
    folder, words = json.loads(line)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.setsid()  # a group of its own, for signals
        os.chdir(folder)
        os.close(reading); os.dup2(os.open(os.devnull, os.O_RDONLY), 0); os.dup2(writing, 1); os.dup2(writing, 2)
        sys.argv = ["snakemake", *words]
        code = 1
        try:
            snakemake.cli.main(words)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            print(end.code if isinstance(end.code, str) else "", flush=True)
        finally:
            sys.stdout.flush(); os._exit(code)
    print(child, flush=True)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        text = stream.read()
    _, status, usage = os.wait4(child, 0)
    print(json.dumps([os.waitstatus_to_exitcode(status), text, usage.ru_utime + usage.ru_stime]), flush=True)
"""
PROFILE = "Using workflow specific profile"


@dataclass(frozen=True)
class Outcome:
    """What one command line gave. text: stdout and stderr."""

    code: int
    text: str
    cpu_seconds: float

    @property
    def lines(self) -> list[str]:
        """Without the line that names the profile, and empty ones."""
        return [line for line in self.text.splitlines() if line.strip() and not line.startswith(PROFILE)]


class SnakemakeForks:
    """A process that has imported Snakemake and this project, once, and runs command lines in children of its own.

    Args:
        project: the folder whose stages it imports.
        shims: a folder of `LibraryForks`, whose `python` runs the stages, with its IMPORT_VARIABLES; None: this
            process's.
    """

    def __init__(self, project: Path, environment: dict[str, str] | None = None, shims: Path | None = None):
        python = shims / "python" if shims else sys.executable
        self._process = subprocess.Popen(
            [sys.executable, "-c", FORKS, str(python)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=project,
            env=(environment or os.environ) | (IMPORT_VARIABLES if shims else {}) | {"PYTHONPATH": str(project)})

    def __enter__(self) -> "SnakemakeForks":
        return self

    def __exit__(self, *_) -> None:
        self._process.communicate()  # the end of its input is its own

    def run(self, words: Sequence[str], folder: Path) -> Outcome:
        """Run a command line, without the program, in a folder."""
        self.start(words, folder)
        return self.wait()

    def start(self, words: Sequence[str], folder: Path) -> int:
        """Start a command line; return the id of its process and group. `wait` comes before the next one."""
        self._process.stdin.write(json.dumps([str(folder), list(words)]) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def wait(self) -> Outcome:
        """Wait until what was started and everything that writes to its output have ended."""
        return Outcome(*json.loads(self._process.stdout.readline()))


def list_planned_jobs(text: str) -> set[str]:
    """List the jobs of a dry run: the rule and, for a merge, its stage."""
    jobs = re.findall(r"^(?:local)?rule (\w+):\n((?: +.*\n)*)", text, re.MULTILINE)
    return {" ".join([rule, *re.findall(r"wildcards: stage=(\w+)", facts)]) for rule, facts in jobs}
