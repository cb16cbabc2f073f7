"""Refuse `pip install .` in one line: the build backend that pyproject.toml names.

There is no package to install: Snakefile, recipes and stages are read from the project's folder.
"""

import sys

MESSAGE = ("stackllama: nothing can be installed: the project runs from its folder. Type `make install` there, then "
           "`snakemake --cores all ppo`; for the dependencies alone: pip install --requirement constraints.txt")


def refuse(*arguments: object, **settings: object) -> None:
    """Say where the project runs, and exit with 1; takes what a frontend passes to any hook (PEP 517, PEP 660)."""
    sys.exit(MESSAGE)


get_requires_for_build_wheel = get_requires_for_build_editable = get_requires_for_build_sdist = refuse
build_wheel = build_editable = build_sdist = refuse
