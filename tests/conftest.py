"""Set up torch for the tests as a stage does."""

import sys

import pytest

from stages.runtime.environment import let_idle_threads_sleep

let_idle_threads_sleep()


@pytest.fixture(scope="session", autouse=True)
def torch_as_in_a_stage():
    if "torch" in sys.modules:
        from stages.modeling import torch_setup

        torch_setup.prepare()
