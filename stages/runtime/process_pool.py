"""Map a function over many items in several processes, with the results in the order of the items."""

import multiprocessing
import os
import signal
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

from stages.runtime import stopping
from stages.runtime.processes import end_with_parent

QUEUED_PER_PROCESS = 2  # items: enough to keep a process busy, few enough that results do not pile up


class ProcessPool:
    """Worker processes for the duration of a `with` block; with `processes` = 1, this process does the work."""

    def __init__(self, processes: int):
        self.processes = processes

    def __enter__(self) -> "ProcessPool":
        if self.processes > 1:
            # Spawned, not forked: a fork would copy locks that threads of this process hold.
            context = multiprocessing.get_context("spawn")
            self.executor = ProcessPoolExecutor(self.processes, context, _prepare_worker)
        return self

    def __exit__(self, error, *_) -> None:
        if self.processes > 1:
            stopped = error is not None and issubclass(error, KeyboardInterrupt)
            if stopped:
                _kill_workers()
            self.executor.shutdown(cancel_futures=not stopped)  # those of killed workers end as failed

    def imap(self, function: Callable, items: Iterable) -> Iterator:
        """Yield `function(item)` for every item, in order. Items are taken only as they are needed.

        Args:
            function: defined at the top level of a module; items and results can be pickled.

        Raises what the function raises for an item, in its place; ChildProcessError if a worker was killed.
        """
        if self.processes <= 1:
            yield from map(function, items)
            return
        futures: deque = deque()
        try:
            for item in items:
                futures.append(self.executor.submit(function, item))
                if len(futures) > self.processes * QUEUED_PER_PROCESS:
                    yield futures.popleft().result()
            while futures:
                yield futures.popleft().result()
        except BrokenProcessPool:
            raise ChildProcessError("a worker process was killed, as the system does when memory runs out: run the "
                                    "same command again, with fewer processes (--processes)") from None
        except KeyboardInterrupt:
            _kill_workers()
            wait(futures)
            raise
        finally:
            wait([future for future in futures if not future.cancel()])


def _kill_workers() -> None:
    """End the workers in the middle of their items: whoever stops a program does not wait for them."""
    for process in multiprocessing.active_children():
        process.kill()


def _prepare_worker() -> None:
    """Leave signals to the whole process group to the parent, and exit when it has ended, for whatever reason."""
    for number in stopping.SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(os.getppid())
