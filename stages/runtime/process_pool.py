"""Work on many units in several processes; the results come in the order of the units, whoever was faster."""

import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

UNITS_AHEAD = 2  # of each process: enough to keep it busy, little enough to keep results from piling up
LOOK_FOR_PARENT_EVERY_SECONDS = 0.5


class Workers:
    """So many processes, for as long as the `with` block lasts; with one, the work is done here and none is started."""

    def __init__(self, processes: int):
        self.processes = processes

    def __enter__(self) -> "Workers":
        if self.processes > 1:
            # Spawned, not forked: a fork would copy locks that threads of this process hold.
            self.pool = ProcessPoolExecutor(self.processes, multiprocessing.get_context("spawn"), _start)
        return self

    def __exit__(self, *error) -> None:
        if self.processes > 1:
            self.pool.shutdown(cancel_futures=True)

    def each(self, function: Callable, units: Iterable) -> Iterator:
        """`function(unit)` for every unit, in order; a module-level function, units and results that can be pickled.

        An error of a unit is raised here, in its place. ChildProcessError when a process was killed from outside.
        """
        if self.processes <= 1:
            yield from map(function, units)
            return
        waiting: deque = deque()
        try:
            for unit in units:
                waiting.append(self.pool.submit(function, unit))
                if len(waiting) > self.processes * UNITS_AHEAD:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool:
            raise ChildProcessError("a worker process was killed, as the system does when memory runs out: run the "
                                    "same command again, with fewer processes (--processes)") from None
        finally:
            wait([future for future in waiting if not future.cancel()])


def _start() -> None:
    """A worker leaves Ctrl-C to its parent, and ends when the parent is gone, however that ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_FOR_PARENT_EVERY_SECONDS)
    os._exit(1)
