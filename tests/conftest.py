"""Set up torch for the tests as a stage does."""

import gc
import os
import signal
import sys
from pathlib import Path

import pytest

from stages.runtime.environment import let_idle_threads_sleep

ROOT = Path(__file__).parents[1]
let_idle_threads_sleep()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script, also by children
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise under nohup
# What `make test-slow` runs, and `make test` does not: whole runs, kills, several processes, browsers, llama.cpp. The
# longest first: last, one of them would keep one worker busy while the others have nothing to do.
SLOW_FILES = (
    "pipeline/test_workflow.py", "pipeline/test_soak.py", "pipeline/test_smollm2.py", "pipeline/test_resume.py",
    "pipeline/test_slurm.py", "modeling/test_smollm2.py", "reporting/test_report_page.py", "pipeline/test_kills.py",
    "distributed/test_world_sizes.py", "stackexchange/test_posts_scale.py", "recipe/test_boundary_runs.py",
    "training/test_trackers.py", "chat/test_demo_page.py", "pipeline/test_sft.py", "distributed/test_sharding.py",
    "modeling/test_cpu_kernel_build.py", "distributed/test_resume.py", "command_line/test_command.py",
    "distributed/test_command.py", "evaluation/test_llama_cpp_check.py")
if "PYTEST_XDIST_WORKER" in os.environ:  # one test process a core: more threads would only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the slow files before all others, and mark their tests."""
    slow = {ROOT / "tests" / file: place for place, file in enumerate(SLOW_FILES)}
    items.sort(key=lambda item: slow.get(item.path, len(slow)))
    for item in items:
        if item.path in slow:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", autouse=True)
def torch_as_in_a_stage():
    if "torch" in sys.modules:
        from stages.modeling import torch_setup

        torch_setup.prepare()


@pytest.fixture(scope="module", autouse=True)
def libraries_without_garbage_collection():
    """Leave what is loaded by now out of garbage collections: a stage has several, and each would take 0.4 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def snakemake_forks(library_forks):
    """A process that has imported Snakemake and this project, for command lines in any folder with its Snakefile."""
    from tests.helpers.snakemake_runs import SnakemakeForks

    with SnakemakeForks(ROOT, os.environ | {"HF_HUB_OFFLINE": "1"}, library_forks.shims) as forks:
        yield forks


@pytest.fixture(scope="session")
def library_forks():
    """Processes that have imported the libraries, for stages whose command line is not what is tested."""
    from tests.helpers.library_forks import LibraryForks

    with LibraryForks() as forks:
        yield forks
