"""Print one line, not a traceback, for a request that the page does not make and Gradio refuses.

A traceback remains for a mistake in this program: an error that our own code raised, and that is no ValueError.
"""

import logging
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

from gradio import queueing, route_utils, routes

from stages.render.terminal import format_value

OURS = str(Path(__file__).parents[1])


def shorten_tracebacks() -> None:
    """Replace what Gradio prints of refused requests, and what its server logs of them."""
    for module in (queueing, route_utils, routes):
        module.traceback = SimpleNamespace(**vars(traceback) | {"print_exc": print_error})
    logging.getLogger("uvicorn.error").addFilter(shorten_record)


def print_error() -> None:
    """Print the error that is being handled."""
    if is_refusal(sys.exception()):
        print(f"demo: {describe_refusal(sys.exception())}", file=sys.stderr)
    else:
        traceback.print_exc()


def shorten_record(record: logging.LogRecord) -> bool:
    """Take the traceback of a refused request out of a record of the server's log."""
    if record.exc_info and is_refusal(record.exc_info[1]):
        record.msg, record.args, record.exc_info = describe_refusal(record.exc_info[1]), (), None
    return True


def is_refusal(error: BaseException) -> bool:
    """Check whether a request is the cause of an error."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, ValueError) or not files[-1].startswith(OURS)


def describe_refusal(error: BaseException) -> str:
    """Describe the error in one line that cannot control the terminal."""
    return f"refused a request that the page does not make: {format_value(f'{type(error).__name__}: {error}', 200)}"
