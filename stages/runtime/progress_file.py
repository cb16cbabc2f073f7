"""Write where a stage is to a file beside its artifact, for those who follow it: `stages.inspect --watch`.

The file `.NAME.progress.json` is there while the stage is at work, as its lock is. If the stage ends without a result,
it stays, with the cause if there was time to write it.
"""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stages.runtime.files import read_json_object, write_json
from stages.runtime.stopping import Stopped

ENDING = ".progress.json"
EVERY_SECONDS = 2.0
TEXT_CHARACTERS = 500
_files: list["_ProgressFile"] = []  # of this process; others that it starts do not write to it


class _ProgressFile:
    def __init__(self, path: Path):
        self.path = path
        self.facts = {"pid": os.getpid(), "process_start": read_process_start(os.getpid()),
                      "host": socket.gethostname(), "started": time.time()}
        self.write({})

    def write(self, facts: dict) -> None:
        """Write the file anew, with these facts added and the time."""
        self.facts |= facts | {"at": time.time()}
        self.written = time.monotonic()
        with suppress(OSError):  # a full disk is for the stage to say
            write_json(self.path, self.facts)


def progress_path(out: Path) -> Path:
    """Return the path of the file of the artifact `out`."""
    return out.with_name(f".{out.name}{ENDING}")


@contextmanager
def follow(out: Path) -> Iterator[None]:
    """Write the file while the block makes `out`; delete it at the end, or write why the block ended without one."""
    file = _ProgressFile(progress_path(out))
    _files.append(file)
    try:
        yield
    except BaseException as error:
        text = error.describe() if isinstance(error, Stopped) else f"failed: {str(error) or type(error).__name__}"
        file.write({"ended": " ".join(text.split())[:TEXT_CHARACTERS]})
        raise
    else:
        file.path.unlink(missing_ok=True)
    finally:
        _files.pop()


def is_due() -> bool:
    """Check whether the file is to be written again."""
    return bool(_files) and time.monotonic() - _files[-1].written >= EVERY_SECONDS


def report(facts: dict) -> None:
    """Write where the work is; see Progress for the facts."""
    _files[-1].write(facts)


def read_progress(out: Path) -> dict | None:
    """Read the file of an artifact; None if there is none that can be read."""
    facts = read_json_object(progress_path(out)) or {}
    numbers = (facts.get(name) for name in ("started", "at", "pid"))
    return facts if all(isinstance(number, int | float) for number in numbers) else None


def is_running(facts: dict) -> bool | None:
    """Check whether the process that wrote these facts still runs; None: on another machine, which cannot be seen."""
    if facts.get("host") != socket.gethostname():
        return None
    start = read_process_start(facts["pid"])
    return start is not None and start == facts.get("process_start")


def read_process_start(pid: int) -> str | None:
    """Return what tells a process from a later one of the same id; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # a zombie has ended
    except (OSError, IndexError):
        pass
    if Path("/proc/self/stat").exists():
        return None
    with suppress(OSError):  # not Linux: the id alone
        os.kill(pid, 0)
        return "unknown"
    return None
