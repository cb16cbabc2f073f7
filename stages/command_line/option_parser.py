"""Parse a command line; answer a mistake in one line, with the nearest option. Name the types of settings."""

import argparse
import dataclasses
import re
import sys
import typing
from types import UnionType
from typing import Any, Literal, NoReturn

from stages.recipe.schema import suggest

KINDS = {int: "integer", float: "number", str: "text", bool: "true or false"}

ALIKE = 0.75  # of 1: with their hyphens, short options are nearly all alike


class OptionParser(argparse.ArgumentParser):
    """A parser that takes --learning_rate for --learning-rate; a mistake is one line, with the nearest option.

    From then on a stdout of ASCII or the like escapes what its encoding lacks, as stderr does.
    """

    def __init__(self, program: str, description: str | None):
        super().__init__(prog=f"python -m stages.{program}", description=description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args=None, namespace=None):
        if not sys.stdout.encoding.lower().startswith("utf"):
            sys.stdout.reconfigure(errors="backslashreplace")
        words = [_hyphenate(word) for word in (sys.argv[1:] if args is None else args)]
        for option in (word.partition("=")[0] for word in words if re.match("--[^=]", word)):
            if option not in self._option_string_actions:  # said before a required option is missed
                known = [option for option in self._option_string_actions if option.startswith("--")]
                self.error(f"there is no option {option}{suggest(option, known, else_all=False, alike=ALIKE)}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog.rpartition('.')[2]}: error: {message} (--help lists the options)\n")


def _hyphenate(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{option.replace('_', '-')}{equals}{value}" if word.startswith("--") else word


def type_name(hint: Any) -> str:
    """Name a type in words: 'integer or null', 'list of text', the values of a Literal."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return " or ".join("null" if part is type(None) else type_name(part) for part in arguments)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is tuple:
        return f"list of {'mappings' if dataclasses.is_dataclass(arguments[0]) else type_name(arguments[0])}"
    return KINDS[hint]


def placeholder(hint: Any) -> str:
    """Name a type as argparse does: NUMBER, INTEGER|null, {lora,full}, TEXT,... for a list."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, UnionType):
        return "|".join("null" if part is type(None) else placeholder(part) for part in arguments)
    if origin is Literal:
        return f"{{{','.join(map(str, arguments))}}}"
    if origin is tuple:
        return "YAML" if dataclasses.is_dataclass(arguments[0]) else f"{placeholder(arguments[0])},..."
    return KINDS[hint].upper()
