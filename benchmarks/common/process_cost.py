"""What one command costs: CPU seconds, wall seconds, memory and disk, of it and of every process that it starts."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common.tables import ROOT

LOOK_EVERY_SECONDS = 1.0
# A process of its own around each run: the system keeps one figure for all children that a process ever had.
WRAPPER = """
import json, resource, subprocess, sys, time
start = time.monotonic()
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
print(json.dumps({"code": done.returncode, "wall": time.monotonic() - start, "cpu": used.ru_utime + used.ru_stime,
                  "peak_kib": used.ru_maxrss, "stdout": done.stdout, "stderr": done.stderr[-5000:]}))
"""


@dataclass(frozen=True)
class Cost:
    """One run. peak_mb: of the largest single process; disk_mb: the most that the watched folder held."""

    cpu: float
    wall: float
    peak_mb: float
    disk_mb: float
    stdout: str


def measured(*command: object, watch: Path | None = None) -> Cost:
    """Run `python COMMAND` from the project's root. SystemExit with its last words when it fails."""
    command = [sys.executable, *map(str, command)]
    with _watching(watch) as most:
        wrapped = subprocess.run([sys.executable, "-c", WRAPPER, *command], cwd=ROOT, stdout=subprocess.PIPE, text=True,
                                 check=True)
    outcome = json.loads(wrapped.stdout)
    if outcome["code"]:
        raise SystemExit(f"{' '.join(command)}: failed with {outcome['code']}\n{outcome['stderr']}")
    return Cost(outcome["cpu"], outcome["wall"], outcome["peak_kib"] * 1024 / 1e6, most[0] / 1e6, outcome["stdout"])


@contextmanager
def _watching(folder: Path | None) -> Iterator[list[int]]:
    """The most bytes that `folder` held meanwhile, as seen once a second, in a list of one."""
    most, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(LOOK_EVERY_SECONDS):
            most[0] = max(most[0], bytes_in(folder))

    thread = threading.Thread(target=watch, daemon=True)
    if folder:
        thread.start()
    try:
        yield most
    finally:
        done.set()
        if folder:
            thread.join()


def bytes_in(folder: Path) -> int:
    """What the files below `folder` take on the disk; files may come and go meanwhile."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(place, name)).st_blocks * 512
            except FileNotFoundError:
                continue
    return total
