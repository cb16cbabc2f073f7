"""Look up and load functions of the user that the recipe names, from the working directory as well."""

import ast
import importlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec


def check_function(name: str, setting: str) -> None:
    """Check that 'package.module:function' exists; ValueError otherwise, as `load_function`.

    Reads the module's source, and imports it only where that does not show a function: an import may take seconds.
    """
    module, function = _split(name, setting)
    try:
        source = find_spec(module).loader.get_source(module)  # imports the packages above it
        body = ast.parse(source).body
    except Exception:  # no such module, no source, a mistake in it: an import says which
        body = []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    if not any(isinstance(node, kinds) and node.name == function for node in body):
        load_function(name, setting)


def load_function(name: str, setting: str) -> Callable:
    """Import the function 'package.module:function'.

    Args:
        setting: name of the setting, for error messages.

    Raises ValueError if it cannot be loaded or is not a function.
    """
    module, function = _split(name, setting)
    try:
        value = getattr(importlib.import_module(module), function)
    except Exception as error:  # the user's module may raise anything
        kind = "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        raise ValueError(f"{setting}: cannot load {name!r}: {kind}{' '.join(str(error).split())}") from error
    if not callable(value):
        raise ValueError(f"{setting}: {name!r} is not a function")
    return value


def _split(name: str, setting: str) -> tuple[str, str]:
    """Split the name into module and function, and make the working directory importable."""
    module, separator, function = name.partition(":")
    if not (module and separator and function):
        raise ValueError(f"{setting}: {name!r} should look like package.module:function")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return module, function
