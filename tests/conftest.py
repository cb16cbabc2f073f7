"""Set up torch for the tests as a stage does."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def torch_as_in_a_stage():
    if "torch" in sys.modules:
        from stages.modeling import torch_setup

        torch_setup.prepare()
