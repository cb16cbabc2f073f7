"""Several processes: order, errors, and that nobody is left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stages.runtime.process_pool import ProcessPool

ROOT = Path(__file__).parents[2]


def imap(function, items, processes: int):
    with ProcessPool(processes) as workers:
        yield from workers.imap(function, items)


def slow_when_small(number: int) -> tuple[int, int]:
    time.sleep(0.05 if number < 3 else 0)
    return number, os.getpid()


def fails_at_five(number: int) -> int:
    if number == 5:
        raise ValueError("five cannot be")
    return number


def dies(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_results_come_in_order_from_as_many_processes(processes):
    actual = list(imap(slow_when_small, range(40), processes))
    assert [number for number, _ in actual] == list(range(40))
    pids = {pid for _, pid in actual}
    assert pids == {os.getpid()} if processes == 1 else 1 < len(pids) <= processes and os.getpid() not in pids


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_in_its_place(processes):
    actual = []
    with pytest.raises(ValueError, match="five cannot be"):
        for number in imap(fails_at_five, range(10), processes):
            actual.append(number)
    assert actual == [0, 1, 2, 3, 4]


def test_a_killed_process_is_said_in_words():
    with pytest.raises(ChildProcessError, match="fewer processes"):
        list(imap(dies, range(3), 2))


def test_items_are_taken_as_they_are_needed():
    taken = []
    with ProcessPool(2) as workers:
        actual = workers.imap(slow_when_small, (taken.append(n) or n for n in range(1000)))
        next(actual)
        assert len(taken) < 10
        actual.close()
        assert list(workers.imap(fails_at_five, range(5))) == [0, 1, 2, 3, 4], "the same processes go on"


SLEEPERS = """
import os, sys, time
from stages.runtime.process_pool import ProcessPool
from tests.runtime.test_process_pool import sleeps
if __name__ == "__main__":
    with ProcessPool(2) as workers:
        list(workers.imap(sleeps, [sys.argv[1]] * 2))
"""


def sleeps(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    time.sleep(60)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_their_parent(tmp_path, how):
    parent = subprocess.Popen([sys.executable, "-c", SLEEPERS, str(tmp_path)], cwd=ROOT, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and all(map(alive, pids))
    parent.send_signal(how)
    parent.wait()
    until = time.monotonic() + 10
    while any(map(alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(alive, pids))
