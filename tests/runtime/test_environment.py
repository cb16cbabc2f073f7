"""What is set before torch is imported."""

import importlib.metadata
import logging
from pathlib import Path

from stages.runtime.environment import KERNEL_LOGGER, KERNEL_RECOMMENDATION, silence_missing_kernel


def test_one_line_of_bitsandbytes_is_left_out_and_no_other(caplog):
    silence_missing_kernel()
    logger = logging.getLogger(KERNEL_LOGGER)
    logger.warning(f"{KERNEL_RECOMMENDATION} kernels-community: %s. Please", ImportError("No module named 'kernels'"))
    logger.warning("this CPU cannot do what you ask")
    assert [record.message for record in caplog.records] == ["this CPU cannot do what you ask"]


def test_that_line_is_still_bitsandbytes_own():
    name = KERNEL_LOGGER.replace(".", "/") + ".py"
    file = next(file for file in importlib.metadata.files("bitsandbytes") if str(file) == name)
    assert KERNEL_RECOMMENDATION in Path(file.locate()).read_text(encoding="utf-8")
