"""Several processes of a stage: where each is, and what is said when one ends. Nothing here loads torch."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from stages.runtime import processes

ROOT = Path(__file__).parents[2]
LAUNCH = """
import sys
from pathlib import Path
from stages.runtime import processes, stopping
processes.GRACE_SECONDS = 2.0
stopping.install()
sys.exit(processes.launch({count}, ["-c", {code!r}], "sft", [Path({log!r})] * {count}))
"""
BEGIN = """
import os, signal, sys, time
from stages.runtime import processes
place = processes.take_place()
"""


def launch(code: str, tmp_path: Path, count: int = 2) -> subprocess.CompletedProcess:
    script = LAUNCH.format(count=count, code=BEGIN + code, log=str(tmp_path / "sft.rank-1.log"))
    shared = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          env=shared)


def test_every_process_knows_its_place_and_libraries_see_one(tmp_path):
    done = launch(f"folder = {str(tmp_path)!r}" + """
named = [name for name in processes.VARIABLES if name in os.environ]
text = f"{place.rank} {place.count} {place.hosts_store} {processes.is_main()} {named}"
text += f" {os.environ['CUDA_VISIBLE_DEVICES']}"
open(os.path.join(folder, str(place.rank)), "w").write(text)
""", tmp_path)
    assert done.returncode == 0 and done.stderr == ""
    assert [(tmp_path / str(rank)).read_text() for rank in (0, 1)] == ["0 2 True True [] 0", "1 2 False False [] 1"]


@pytest.mark.parametrize(("threads", "each"), [("4", "2"), ("1", "1"), ("3,2", "1")])
def test_the_processes_divide_the_threads_of_the_stage(tmp_path, monkeypatch, threads, each):
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    monkeypatch.setenv("MKL_NUM_THREADS", threads)
    names = ["OMP_NUM_THREADS", "MKL_NUM_THREADS"]
    done = launch(f"assert [os.environ[name] for name in {names}] == {[each] * 2}", tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_process_that_is_killed_ends_all_with_one_line(tmp_path):
    start = time.monotonic()
    done = launch("os.kill(os.getpid(), signal.SIGKILL) if place.rank == 1 else time.sleep(300)", tmp_path)
    assert time.monotonic() - start < 30 and done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "sft: error: the process of rank 1, one of 2, was ended by SIGKILL" in line
    assert line.endswith("; the same command continues")


def test_the_first_process_that_is_killed_is_named_too(tmp_path):
    done = launch("os.kill(os.getpid(), signal.SIGKILL) if place.rank == 0 else time.sleep(300)", tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "rank 0, one of 2, was ended by SIGKILL" in line


def test_the_error_of_another_process_is_quoted(tmp_path):
    (tmp_path / "sft.rank-1.log").write_text("progress\nsft: error: a bad file\n")
    done = launch("sys.exit(1) if place.rank == 1 else time.sleep(300)", tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1 and "rank 1, one of 2, failed: sft: error: a bad file" in line


def test_what_the_first_process_has_said_is_not_said_again(tmp_path):
    done = launch("""
if place.rank == 1:
    sys.exit(1)
time.sleep(0.3)
print("sft: error: no such base", file=sys.stderr)
sys.exit(1)""", tmp_path)
    assert done.returncode == 1 and done.stderr == "sft: error: no such base\n"


def test_processes_end_with_their_launcher_however_it_ends(tmp_path):
    """kill -9 of the launcher, which cannot end them itself: they would keep a core for nothing."""
    code = f"open(os.path.join({str(tmp_path)!r}, str(place.rank)), 'w').write(str(os.getpid())); time.sleep(300)"
    script = LAUNCH.format(count=2, code=BEGIN + code, log=str(tmp_path / "log"))
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT)
    deadline = time.monotonic() + 60
    files = [tmp_path / "0", tmp_path / "1"]
    while not all(file.exists() and file.read_text() for file in files) and time.monotonic() < deadline:
        time.sleep(0.05)
    launcher.kill()
    launcher.wait()
    pids = [int(file.read_text()) for file in files]
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in pids)


def test_an_interrupt_reaches_every_process_once(tmp_path):
    code = f"""
open(os.path.join({str(tmp_path)!r}, str(place.rank)), "w").write("here")
try:
    time.sleep(300)
except KeyboardInterrupt:
    os.write(2, f"sft: interrupted {{place.rank}}\\n".encode())  # at once: both write to one pipe
    time.sleep(0.2)
    sys.exit(130)
"""
    script = LAUNCH.format(count=2, code=BEGIN + code, log=str(tmp_path / "log"))
    launcher = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not all((tmp_path / name).exists() and (tmp_path / name).read_text() for name in "01"):
        time.sleep(0.05)
    time.sleep(0.5)
    launcher.send_signal(signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert launcher.returncode == 130 and sorted(said.splitlines()) == ["sft: interrupted 0", "sft: interrupted 1"]


def is_alive(pid: int) -> bool:
    """Check whether a process runs; one that has ended and that nobody waits for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_a_private_copy_shares_nothing_that_is_written(tmp_path):
    folder = tmp_path / "sft.partial"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "history.jsonl").write_text("{}\n")
    (folder / "checkpoints" / "state").write_bytes(bytes(processes.LINK_FROM_BYTES))
    with processes.private_copy(folder, 1) as copy:
        with open(copy / "history.jsonl", "a") as stream:
            stream.write("{}\n")
        assert os.path.samefile(copy / "checkpoints" / "state", folder / "checkpoints" / "state")
        (copy / "checkpoints" / "state").unlink()
    assert (folder / "history.jsonl").read_text() == "{}\n" and (folder / "checkpoints" / "state").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["sft.partial"]


def test_what_runs_in_one_process_is_refused_in_several():
    several = processes.Place(1, 2)
    with pytest.raises(ValueError, match="merge runs in one process, and was started as one of 2"):
        processes.count_processes("merge", 1, 8, several)
    with pytest.raises(ValueError, match="--processes must be at least 1, not 0"):
        processes.count_processes("sft", 0, 8, processes.Place())
    assert processes.count_processes("sft", 3, 8, processes.Place()) == 3
    assert processes.count_processes("sft", 3, 8, several) == 2
    assert processes.count_processes("posts", 8, 8, processes.Place()) == 1


@pytest.mark.parametrize("cores, units, free_gib, driver, expected", [
    ("6", 8, 100, False, 6), ("6", 2, 100, False, 2), ("6", 8, 7, False, 3), ("6", 8, 1, False, 1),
    ("6", 8, 100, True, 1)])
def test_the_number_of_processes_follows_cores_units_and_memory(
        cores, units, free_gib, driver, expected, monkeypatch, tmp_path):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free_gib << 30))
    monkeypatch.setattr(processes, "DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setenv("OMP_NUM_THREADS", cores)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert processes.count_processes("ppo", None, units, processes.Place()) == expected
    processes.limit_threads("ppo", units)
    assert os.environ["OMP_NUM_THREADS"] == (cores if driver else "1")


@pytest.mark.parametrize(("own", "count", "limit_bytes", "launches"), [
    (processes.Place(), 2, None, True), (processes.Place(), 1, None, False), (processes.Place(), 1, 1 << 30, True),
    (processes.Place(is_launched=True), 1, 1 << 30, False), (processes.Place(1, 2), 2, 1 << 30, False)])
def test_only_the_first_process_launches_others_also_at_a_limit_on_memory(
    own, count, limit_bytes, launches, monkeypatch
):
    """The last case is a rank that torchrun has started."""
    monkeypatch.setattr(processes, "address_space_limit", lambda: limit_bytes)
    assert processes.must_launch(count, own) == launches


def test_a_stage_of_one_unit_computes_with_all_threads(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    processes.limit_threads("ppo", 1)
    processes.limit_threads("merge", 8)
    assert os.environ["OMP_NUM_THREADS"] == "6"
