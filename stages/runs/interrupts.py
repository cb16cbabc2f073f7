"""Say in one line that Ctrl-C has ended Snakemake before it handles that itself: while it reads the workflow."""

import sys
from types import TracebackType

_print_error = sys.__excepthook__


def install() -> None:
    """Print no traceback for a KeyboardInterrupt that nothing handles."""
    sys.excepthook = _print_interrupt


def _print_interrupt(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        print("snakemake: stopped by SIGINT: the same command continues", file=sys.stderr)
    else:
        _print_error(kind, error, traceback)
