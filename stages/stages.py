"""Stand in for the package `stages` where a program is run by its path (python stages/sft.py): say how to run it.

Python then searches stages/ in place of the folder around it, so that the program's imports of `stages` load this file.
"""

import sys
from pathlib import Path

if __name__ == "stages":
    program = Path(sys.argv[0])
    sys.exit(f"{program.stem}: error: run it as a module, from {program.resolve().parents[1]}: "
             f"python -m stages.{program.stem}")
