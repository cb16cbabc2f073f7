"""Functions of the user's, named in the recipe."""

import importlib
import os
import sys
from collections.abc import Callable


def load_function(name: str, setting: str) -> Callable:
    """The function named 'package.module:function', looked for from the current folder too.

    setting: what of the recipe names it, for the ValueError in one line when it cannot be had.
    """
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"{setting}: {name!r} should look like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}: cannot load {name!r}: {error}") from None
    if not callable(found):
        raise ValueError(f"{setting}: {name!r} is not a function")
    return found
