"""Where the processes of a stage meet: before the work, to agree on the folder, and when one of them fails."""

import importlib
import sys
from pathlib import Path

from stages.recipe.algorithms import ALGORITHMS
from stages.runtime import processes

# Stages that share their rows.
IN_SEVERAL_PROCESSES = ("base", "sft", "reward", "judge", *ALGORITHMS, "evaluate")
GROUP = "stages.distributed.group"  # imported by name, where there are several processes: it loads torch


def count_processes(stage: str, wanted: int, place: processes.Place) -> int:
    """Return the number of processes to run in: that of `place` if the stage was started as one of several.

    Raises ValueError for a stage that runs in one process, and for fewer than one.
    """
    if stage not in IN_SEVERAL_PROCESSES:
        if place.count > 1:
            raise ValueError(f"{stage} runs in one process, and was started as one of {place.count}: start it without "
                             f"torchrun")
        return 1
    if wanted < 1:
        raise ValueError(f"--processes must be at least 1, not {wanted}")
    return place.count if place.count > 1 else wanted


def share_folder(folder: Path | None) -> Path | None:
    """Return the folder that the first process builds the artifact in; None: there is nothing to do."""
    if processes.place().count == 1:
        return folder
    group = importlib.import_module(GROUP)
    group.start()
    shared = group.from_main(str(folder) if folder else None)
    return Path(shared) if shared else None


def wait_for_all() -> None:
    """Wait until every process is here."""
    if processes.place().count > 1:
        sys.modules[GROUP].from_main(None)


def name_lost_process(error: BaseException) -> BaseException:
    """Return the error, or one that says which process was lost, if that is its cause."""
    return sys.modules[GROUP].name_lost_process(error) if GROUP in sys.modules else error


def report_failure(message: str) -> None:
    """Tell the other processes, if this one has met them, why it ends."""
    if GROUP in sys.modules:
        sys.modules[GROUP].report_failure(" ".join(message.split()))
