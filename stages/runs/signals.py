"""Pass SIGTERM on from Snakemake to the stages that it runs: alone, it would wait for them, maybe for days."""

import os
import signal
import threading
from contextlib import suppress


def forward_sigterm() -> None:
    """Let SIGTERM end the stages beside what Snakemake does with it; call it after Snakemake has set its handler."""
    wait_for_jobs = signal.getsignal(signal.SIGTERM)

    def handle(number, frame) -> None:
        if callable(wait_for_jobs):
            # In a thread: it takes a lock that the interrupted code may have.
            threading.Thread(target=wait_for_jobs, args=(number, frame)).start()
        for pid in list_stages():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)

    signal.signal(signal.SIGTERM, handle)


def list_stages() -> list[int]:
    """List the processes that the shells of this process run.

    The shells themselves wait for them, and what a stage has started is the stage's to end.
    """
    import psutil  # of Snakemake's requirements; a dry run does without it

    stages = []
    for shell in psutil.Process().children():
        with suppress(psutil.Error):
            stages += [child.pid for child in shell.children()]
    return stages
