"""Begin the program of a stage: handle signals first of all, then load what parses and runs its command."""

import importlib
import sys
from pathlib import Path

from stages.runtime import stopping

COMMAND = "stages.command_line.command"  # imported by name: that takes longer than the start of Python


def main(file: str) -> None:
    """Run the command of the program `file` and exit: with 1 and one line for a user's mistake.

    Stopped by Ctrl-C, SIGTERM or SIGHUP: with 130, 143 or 129, and one line.
    """
    stopping.install()
    try:
        importlib.import_module(COMMAND).run_command(Path(file))
        stopping.ignore()
    except stopping.Stopped as stop:
        from stages.runtime.stage_lines import print_line

        print_line(f"{Path(file).stem}: {stop.describe()}")
        sys.exit(stop.exit_code)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == __name__.partition(".")[0]:
            raise  # a defect of ours
        sys.exit(f"{Path(file).stem}: error: {sys.executable} has no package {error.name!r}: activate the environment "
                 f"that has the pipeline's packages (source .venv/bin/activate), or make it (make install)")
    sys.exit(0)
