"""Run many Snakemake command lines: one process imports Snakemake, and forks for each."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FORKS = """
import json, os, sys
import snakemake.cli
import stages.runs.console, stages.runs.run_folder, stages.runs.staleness  # what the Snakefile needs
snakemake.cli.get_argument_parser()  # finds the plugins
results = []
for words in json.load(sys.stdin):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading); os.dup2(writing, 1); os.dup2(writing, 2)
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
    os.close(writing)
    with os.fdopen(reading, errors="replace") as stream:
        text = stream.read()
    _, status, usage = os.wait4(child, 0)
    results.append([os.waitstatus_to_exitcode(status), text, usage.ru_utime + usage.ru_stime])
print(json.dumps(results))
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


def run_snakemake(commands: list[list[str]], folder: Path) -> list[Outcome]:
    """Run command lines (without the program) one after another in a folder."""
    done = subprocess.run([sys.executable, "-c", FORKS], input=json.dumps(commands), cwd=folder, capture_output=True,
                          text=True, check=True, env=os.environ | {"PYTHONPATH": str(folder)})
    return [Outcome(*outcome) for outcome in json.loads(done.stdout)]
