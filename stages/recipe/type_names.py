"""Name the types of settings: in words for a page, and as placeholders for a command line."""

import dataclasses
import typing
from types import UnionType
from typing import Any, Literal

KINDS = {int: "integer", float: "number", str: "text", bool: "true or false"}


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
