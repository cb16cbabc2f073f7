"""Set up torch for the tests as a stage does."""

import gc
import os
import signal
import sys

import pytest

from stages.runtime.environment import let_idle_threads_sleep

let_idle_threads_sleep()
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a script, also by children
if "PYTEST_XDIST_WORKER" in os.environ:  # one test process a core: more threads would only wait for each other
    os.environ["OMP_NUM_THREADS"] = "1"


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
def library_forks():
    """Processes that have imported the libraries, for stages whose command line is not what is tested."""
    from tests.helpers.library_forks import LibraryForks

    with LibraryForks() as forks:
        yield forks
