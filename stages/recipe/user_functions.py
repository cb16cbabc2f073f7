"""Load functions of the user that the recipe names."""

import importlib
import os
import sys
from collections.abc import Callable


def load_function(name: str, setting: str) -> Callable:
    """Import the function 'package.module:function', from the working directory as well.

    Args:
        setting: name of the setting, for error messages.

    Raises ValueError if it cannot be loaded or is not a function.
    """
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"{setting}: {name!r} should look like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    try:
        value = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{setting}: cannot load {name!r}: {error}") from None
    if not callable(value):
        raise ValueError(f"{setting}: {name!r} is not a function")
    return value
