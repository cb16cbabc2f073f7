"""Work on many units in several processes; the results come in the order of the units, whoever was faster."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

UNITS_AHEAD = 2  # of each process: enough to keep it busy, little enough to keep results from piling up
LOOK_FOR_PARENT_EVERY_SECONDS = 0.5


def each(function: Callable, units: Iterable, processes: int) -> Iterator:
    """`function(unit)` for every unit, in order; a module-level function, units and results that can be pickled.

    With one process nothing is started. An error of a unit is raised here, in its place. ChildProcessError when a
    process was killed from outside.
    """
    if processes <= 1:
        yield from map(function, units)
        return
    # Spawned, not forked: a fork would copy locks that threads of this process hold.
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start, (os.getpid(),))
    try:
        yield from _in_order(pool, function, units, processes * UNITS_AHEAD)
    except BrokenProcessPool:
        raise ChildProcessError("a worker process was killed, as the system does when memory runs out: run the same "
                                "command again, with fewer processes (--processes)") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, function: Callable, units: Iterable, ahead: int) -> Iterator:
    waiting = deque()
    for unit in units:
        waiting.append(pool.submit(function, unit))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start(parent: int) -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT_EVERY_SECONDS)
    os._exit(1)
