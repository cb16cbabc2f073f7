"""Kill, fill and damage the tiny pipeline at random until it is finished: every artifact must equal an undisturbed one.

    python -m benchmarks.soak.run --kills 100
    python -m benchmarks.soak.run --kills 3 --fills 1 --flips 1 --target base

The runs are made in copies of the project in --folder. The kills take turns: SIGKILL to all processes, to all within a
second after a stage was made, and to Snakemake alone; Ctrl-C (SIGINT to all); SIGTERM and SIGHUP (to Snakemake alone,
or to all). A disturbed run that finishes is compared, and another one is started, until all disturbances were made.
Exits with 1 if a finished stage is made again, an artifact differs, a process is left behind or this project's code
prints a traceback (Snakemake itself does while it starts). A full disk is a small tmpfs, which only root can mount;
else RLIMIT_FSIZE.
"""

import argparse
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from glob import escape, glob
from pathlib import Path

from benchmarks.quality.compare_artifacts import differences, file_digests, stage_metrics
from benchmarks.soak.disturbances import (
    POLL_SECONDS,
    StillRunningError,
    date_in_future,
    end_run,
    flip_byte,
    full_disk,
    limit_files,
    small_disk,
)

ROOT = Path(__file__).parents[2]
PROJECT = ("Snakefile", "environment.yml", "workflow", "profiles", "configs", "stages", "data")
RUN, DUMP, LOG = Path("results/tiny"), "dump", "soak.log"
SNAKEMAKE = (sys.executable, "-m", "snakemake")
# Signal, whether all processes get it (None: left to chance), and whether it waits for a stage to be made.
KILLS = {"SIGKILL": (signal.SIGKILL, True, False), "SIGTERM": (signal.SIGTERM, None, False),
         "SIGINT": (signal.SIGINT, True, False), "SIGKILL alone": (signal.SIGKILL, False, False),
         "SIGHUP": (signal.SIGHUP, None, False), "SIGKILL after a stage": (signal.SIGKILL, True, True)}
OUR_TRACEBACK = re.compile(r'^ +File ".*(/stages/.*\.py|/Snakefile|\.smk)", line', re.MULTILINE)
MAX_SECONDS = 40.0  # until a kill
RUN_SHARE = 0.8  # of the time of an undisturbed run: as long as a kill waits at most, so that it strikes
AFTER_SECONDS = 1.0  # from a checkpoint, or from a finished stage, to the kill: at most


class Soak:
    """One project in `folder` that is disturbed. problems: what went wrong, a line each."""

    def __init__(self, folder: Path, target: str, rng: random.Random):
        self.folder, self.target, self.rng = folder, target, rng
        self.problems: list[str] = []
        self.stage_inodes: dict[Path, int] = {}  # of the finished stages: another one, made again
        self.max_seconds = MAX_SECONDS
        self.process: subprocess.Popen | None = None

    def start(self, prepare=None) -> subprocess.Popen:
        """Start Snakemake as a process group of its own; its output is appended to LOG."""
        command = [*SNAKEMAKE, "--cores", "1", self.target, "--config", "recipe=configs/tiny.yaml", f"dump={DUMP}",
                   "name=tiny"]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with open(self.folder / LOG, "ab") as log:
            self.process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=log, stderr=log,
                                            start_new_session=True, preexec_fn=prepare)
        return self.process

    def close(self) -> None:
        """End what still runs, where the soak itself was stopped."""
        if self.process is not None and self.process.poll() is None:
            end_run(self.process, signal.SIGKILL, whole_group=True)

    def flip(self) -> str | None:
        """Change a byte in a checkpoint; until there is one, run up to the next one, and kill. None: the run ended."""
        while not (changed := flip_byte(self.folder / RUN, self.rng)):
            if self.kill("SIGKILL", after_checkpoint_seconds=0) is None:
                return None
        return f"a byte changed in {changed.relative_to(self.folder)}"

    def kill(self, kind: str, after_checkpoint_seconds: float | None = None) -> str | None:
        """Run until a random moment, or until just after a checkpoint, and signal; None if the run ended before.

        kind: of KILLS. after_checkpoint_seconds: None leaves it to chance, which of both.
        """
        number, whole_group, after_stage = KILLS[kind]
        process, start = self.start(), time.monotonic()
        delay = after_checkpoint_seconds
        if delay is None and (after_stage or self.rng.random() < 0.5):
            delay = self.rng.uniform(0, AFTER_SECONDS)
        list_marks = self._list_stages if after_stage else self._list_checkpoints
        before = None if delay is None else list_marks()
        seconds = self.rng.uniform(0, self.max_seconds) if before is None else self.max_seconds
        deadline = math.inf if after_stage else start + seconds
        while process.poll() is None and time.monotonic() < deadline:
            if before is not None and list_marks() - before:
                before, deadline = None, time.monotonic() + delay
            time.sleep(POLL_SECONDS)
        if process.poll() is not None:
            if process.returncode:
                self.problems.append(f"undisturbed, a run ended with {process.returncode}: see {self.folder / LOG}")
            return None
        whole_group = self.rng.random() < 0.5 if whole_group is None else whole_group
        seconds = time.monotonic() - start
        try:
            end_run(process, number, whole_group)
        except StillRunningError as error:
            self.problems.append(str(error))
        receiver = "all" if whole_group else "Snakemake"
        return f"{number.name} to {receiver}{', a stage just made,' if after_stage else ''} after {seconds:.1f} s"

    def fill(self, mounted: bool) -> str:
        """Run on a full disk until the run ends by itself."""
        if mounted:
            with full_disk(self.folder / "results", self.rng):
                code = self.start().wait()
            return f"full disk: ended with {code}"
        code = self.start(partial(limit_files, self.rng)).wait()
        return f"files of limited size: ended with {code}"

    def finish(self) -> float:
        """Run undisturbed to the end, and return the seconds; a run that fails is a problem."""
        start = time.monotonic()
        if code := self.start().wait():
            self.problems.append(f"undisturbed, a run ended with {code}: see {self.folder / LOG}")
        return time.monotonic() - start

    def is_finished(self) -> bool:
        return (self.folder / RUN / ("report" if self.target == "ppo" else self.target) / "manifest.json").exists()

    def check_made(self) -> None:
        """Note which stages are finished; one that was finished before, and was made again, is a problem."""
        inodes = {folder: folder.stat().st_ino for folder in self._list_stages()}
        self.problems += [f"{folder.name} was finished, and is made again or gone"
                          for folder, inode in self.stage_inodes.items() if inodes.get(folder) != inode]
        self.stage_inodes |= inodes

    def begin_anew(self) -> None:
        """Delete the run."""
        shutil.rmtree(self.folder / RUN)
        self.stage_inodes = {}

    def compare(self, quiet: Path) -> None:
        """Compare all artifacts with those of the undisturbed run."""
        for measure in (file_digests, stage_metrics):
            self.problems += differences(measure(quiet / RUN), measure(self.folder / RUN))

    def _list_checkpoints(self) -> set[str]:
        """List the complete checkpoints. Folders come and go meanwhile, at which Python 3.11's Path.glob would fail."""
        return set(glob(f"{escape(str(self.folder / RUN))}/*.partial/**/checkpoint-*/complete.json",
                        recursive=True, include_hidden=True))

    def _list_stages(self) -> set[Path]:
        """List the finished stages; Snakemake may have deleted the manifest itself."""
        folders = {copy.parent for copy in (self.folder / RUN).glob("*/.manifest.json")}
        return {folder for folder in folders if folder.suffix != ".partial"}


def copy_project(folder: Path) -> Path:
    """Copy what a run reads to `folder`, with a tiny dump."""
    for name in PROJECT:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.7z", "models"))
        else:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder)
    subprocess.run([sys.executable, "data/demo/generate.py", "--questions", "120", "--seed", "1", "--out", DUMP],
                   cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder


def plan(kills: int, fills: int, flips: int, rng: random.Random) -> list[str]:
    """List the disturbances in random order; the kills take turns, and the clock is set back once."""
    others = ["fill"] * fills + ["flip"] * flips + ["clock"]
    kinds = list(KILLS)
    steps = [kinds[number % len(kinds)] for number in range(kills)]
    for other in others:
        steps.insert(rng.randrange(len(steps) // 4, len(steps) + 1), other)
    return steps


def soak(disturbed: Soak, quiet: Path, steps: list[str], mounted: bool) -> None:
    """Make all disturbances, with as many runs as that takes, and compare each."""
    remaining = list(steps)
    while remaining and not disturbed.problems:
        step = remaining[0]
        if disturbed.is_finished():
            disturbed.compare(quiet)
            disturbed.begin_anew()
            _say("a disturbed run is finished and compared; the next one begins")
        if step == "fill":
            what = disturbed.fill(mounted)
        elif step == "flip":
            what = disturbed.flip()
        elif step == "clock":
            date_in_future(disturbed.folder / DUMP)
            what = "the dump is dated in the future"
        else:
            what = disturbed.kill(step)
        disturbed.check_made()
        if what is not None:
            del remaining[0]
            _say(f"{len(steps) - len(remaining)}/{len(steps)}  {what}")
    disturbed.finish()
    disturbed.check_made()
    disturbed.compare(quiet)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--fills", type=int, help="times that the disk is full (default: a tenth of the kills)")
    parser.add_argument("--flips", type=int, help="bytes changed in checkpoints (default: a tenth of the kills)")
    parser.add_argument("--target", default="ppo", help="what to make (default: ppo, everything)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="where to work; it must not exist (default: a temporary folder)")
    given = parser.parse_args(arguments)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="soak-")) / "soak"
    if folder.exists():
        parser.error(f"{folder} exists: name another --folder")
    tenth = given.kills // 10
    rng = random.Random(given.seed)
    steps = plan(given.kills, tenth if given.fills is None else given.fills,
                 tenth if given.flips is None else given.flips, rng)
    quiet, disturbed = (Soak(copy_project(folder / name), given.target, rng) for name in ("quiet", "disturbed"))
    _say(f"in {folder}: first an undisturbed run")
    disturbed.max_seconds = min(MAX_SECONDS, RUN_SHARE * quiet.finish())
    if quiet.problems:
        _say(quiet.problems[0])
        return 1
    with small_disk(disturbed.folder / "results") as mounted:
        if not mounted:
            _say("no file system can be mounted here: a full disk is a limit on the size of files instead")
        try:
            soak(disturbed, quiet.folder, steps, mounted)
        finally:
            disturbed.close()
        if mounted:
            shutil.copytree(disturbed.folder / "results", folder / "results", dirs_exist_ok=True)
    if OUR_TRACEBACK.search((disturbed.folder / LOG).read_text(encoding="utf-8", errors="replace")):
        disturbed.problems.append(f"{disturbed.folder / LOG} has a traceback of this project's code")
    print("\n".join([*disturbed.problems, f"{len(steps)} disturbances, {len(disturbed.problems)} problems"]))
    return 1 if disturbed.problems else 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was mounted is unmounted
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # under nohup: a handler is not passed on, ignoring is
        signal.signal(signal.SIGHUP, lambda number, frame: None)
    sys.exit(main())
