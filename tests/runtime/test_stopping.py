"""Ctrl-C, SIGTERM, SIGHUP: one line, a checkpoint where there is one, exit codes 130, 143, 129, nobody left behind."""

import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = '''"""Probe: a stage that can be stopped."""
from stages.command_line.start import main

if __name__ == "__main__":
    main(__file__)

import atexit
import os
import pty
import signal
import time
from pathlib import Path
from stages.recipe.sections.models import Merge
from stages.runtime.process_pool import ProcessPool
from stages.runtime.stopping import Stopped, deferred

def sleep_in_worker(folder: Path) -> None:
    (folder / f"worker-{os.getpid()}").touch()
    time.sleep(60)

def run(config: Merge, out: Path, *, base: Path, mode: str = "") -> dict[str, float]:
    if mode == "pool":
        with ProcessPool(2) as workers:
            list(workers.imap(sleep_in_worker, [base] * 4))
    elif mode == "exits":
        (base / "begun").touch()
        atexit.register(lambda: (os.kill(os.getpid(), signal.SIGTERM), time.sleep(0.2)))
        return {}
    elif mode == "once":
        (base / "begun").touch()
        time.sleep(60)
    with deferred() as request:
        (base / "begun").touch()
        while not (mode == "finishes" and (base / "go-on").exists()):
            time.sleep(0.05)
            if request.signal and mode == "checkpoint" and (base / "go-on").exists():
                raise Stopped(request.signal, "step 12")
    return {}
'''


@pytest.fixture
def begin(tmp_path):
    (tmp_path / "probe.py").write_text(PROGRAM)
    (tmp_path / "base").mkdir()

    def start(mode: str, marks: int = 1) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(tmp_path / "probe.py"), "--base", str(tmp_path / "base"), "--out",
             str(tmp_path / "out"), "--mode", mode], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True)
        wait_for(lambda: len(list((tmp_path / "base").iterdir())) >= marks)
        return process
    start.base = tmp_path / "base"
    return start


def wait_for(condition) -> None:
    until = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_stage_that_has_no_checkpoint_to_save_stops_at_once_in_one_line(begin, number, code):
    process = begin("once")
    process.send_signal(number)
    _, lines = process.communicate(timeout=5)
    assert process.returncode == code
    assert lines == f"probe: stopped by {number.name}: the same command continues\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_training_goes_on_to_its_checkpoint(begin, number, code):
    process = begin("checkpoint")
    process.send_signal(number)
    process.send_signal(signal.SIGTERM)  # the same request, from the group and from Snakemake
    time.sleep(0.2)
    assert process.poll() is None
    (begin.base / "go-on").touch()
    _, lines = process.communicate(timeout=5)
    assert process.returncode == code
    assert lines.endswith(f"probe: stopped by {number.name} at step 12, with a checkpoint: the same command "
                          "continues\n")


def test_a_closed_terminal_is_a_hangup_that_training_answers_with_its_checkpoint(tmp_path):
    """What it writes to the terminal then fails."""
    (tmp_path / "probe.py").write_text(PROGRAM)
    (tmp_path / "base").mkdir()
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(ROOT)
        os.execve(sys.executable, [
            sys.executable, str(tmp_path / "probe.py"), "--base", str(tmp_path / "base"), "--out",
            str(tmp_path / "out"), "--mode", "checkpoint"], os.environ | {"PYTHONPATH": str(ROOT)})
    wait_for((tmp_path / "base/begun").exists)
    os.close(terminal)
    time.sleep(0.2)
    assert is_alive(pid)
    (tmp_path / "base/go-on").touch()
    status = []
    wait_for(lambda: status or status.extend(os.waitpid(pid, os.WNOHANG)) or status[0] or status.clear())
    assert os.waitstatus_to_exitcode(status[1]) == 129


def test_training_that_ends_before_it_can_stop_is_finished(begin):
    process = begin("finishes")
    process.send_signal(signal.SIGTERM)
    (begin.base / "go-on").touch()
    assert process.wait(timeout=5) == 0 and (begin.base.parent / "out/manifest.json").exists()


def test_a_signal_while_the_command_line_is_loaded_is_one_line(tmp_path):
    """That takes a quarter of a second, in which the soak's Ctrl-C has struck."""
    code = ("import os, signal, sys, importlib\n"
            "from stages.command_line import start\n"
            "start.importlib = type('Slow', (), {'import_module': lambda name: os.kill(os.getpid(), signal.SIGINT)})\n"
            "start.main('stages/merge.py')\n")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=20)
    assert done.returncode == 130 and done.stderr == (
        "merge: stopped by SIGINT: the same command continues\n")


def test_a_signal_in_the_exit_handlers_changes_nothing(begin):
    """The soak has seen it: a library's exit handler printed a traceback."""
    process = begin("exits")
    _, errors = process.communicate(timeout=5)
    assert process.returncode == 0 and "Traceback" not in errors and "made in" in errors


def test_a_second_ctrl_c_ends_at_once(begin):
    process = begin("checkpoint")
    process.send_signal(signal.SIGINT)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=2) == -signal.SIGINT


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("whole_group", [True, False])
def test_workers_in_the_middle_of_an_item_end_with_it(begin, number, whole_group):
    process = begin("pool", marks=2)
    pids = [int(path.name.removeprefix("worker-")) for path in begin.base.iterdir()]
    (os.killpg if whole_group else os.kill)(process.pid, number)
    _, lines = process.communicate(timeout=5)
    assert process.returncode == 128 + number and lines.count("\n") == 1 and "probe: stopped by" in lines
    wait_for(lambda: not any(map(is_alive, pids)))
