"""What the soak does to a run: signals, a full disk, a changed byte in a checkpoint, a dump dated in the future."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

DISK_BYTES = 256 << 20
MAX_FREE_BYTES = 1 << 20  # left on the full disk: some of a stage's files fit
MAX_FILE_BYTES = 200_000  # where no disk can be mounted
END_SECONDS = 60  # a stopped run must have ended by then
STAGE_SECONDS = 600  # and a stage whose Snakemake was killed
POLL_SECONDS = 0.02


class StillRunningError(RuntimeError):
    """Processes are left although their run was stopped."""


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """Mount a small tmpfs at `folder` for the block; yield whether that was permitted."""
    folder.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def full_disk(folder: Path, rng: random.Random) -> Iterator[None]:
    """Fill the disk of `folder`, up to a random rest, for the block."""
    filler = folder / "filler"
    try:
        with open(filler, "wb") as stream:
            os.posix_fallocate(stream.fileno(), 0,
                               max(1, shutil.disk_usage(folder).free - rng.randrange(MAX_FREE_BYTES)))
        yield
    finally:
        filler.unlink(missing_ok=True)


def limit_files(rng: random.Random) -> None:
    """Let no file of this process and its children grow over a random size: a full disk, where none can be mounted."""
    limit = rng.randrange(1000, MAX_FILE_BYTES)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))


def end_run(process: subprocess.Popen, number: int, whole_group: bool) -> None:
    """Signal a run, and wait until all its processes are gone; StillRunningError after END_SECONDS.

    A stage goes on to its end if Snakemake alone is killed: STAGE_SECONDS.
    """
    seconds = STAGE_SECONDS if number == signal.SIGKILL and not whole_group else END_SECONDS
    processes = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
    with suppress(ProcessLookupError):
        (os.killpg if whole_group else os.kill)(process.pid, number)
    until = time.monotonic() + seconds
    while process.poll() is None or any(map(_is_running, processes)):
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise StillRunningError(f"{seconds} s after {signal.Signals(number).name}, the run has not ended")
        time.sleep(POLL_SECONDS)


def flip_byte(run: Path, rng: random.Random) -> Path | None:
    """Change one bit in a file of a checkpoint of the run; return the file, None if there is no checkpoint."""
    files = [file for file in sorted(run.glob("*.partial/**/checkpoint-*/*")) if file.is_file() and file.stat().st_size]
    if not files:
        return None
    file = rng.choice(files)
    content = bytearray(file.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    file.write_bytes(content)
    return file


def date_in_future(folder: Path) -> None:
    """Date the files of the dump a day ahead, as after the clock was set back."""
    tomorrow = time.time() + 86_400
    for file in folder.iterdir():
        os.utime(file, (tomorrow, tomorrow))


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
