"""Define settings as frozen dataclasses, and override them strictly from mappings and text.

An unknown key or a wrong type raises SettingsError: one line that names the setting and what to do.
"""

import dataclasses
import difflib
import math
import re
import reprlib
import types
import typing
from collections.abc import Iterable, Iterator
from datetime import date
from typing import Any, Literal, Union

import yaml

from stages.recipe.ranges import Range
from stages.recipe.removed import REMOVED_SETTINGS, drop_removed

EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+", re.ASCII)
LISTED_LAST = ("save_every_minutes", "sharding", "cpu_kernels", "log_to", "seed")  # how, not what is computed
TYPE_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


class SettingsError(ValueError):
    """A setting is wrong; the message is one line that says where and what to do."""


def setting(default: Any, doc: str, *, within: Range | None = None, affects_result: bool = True,
            absent_means: Any = dataclasses.MISSING) -> Any:
    """Declare a field of a section.

    Args:
        doc: one line with the meaning, the unit (where the name does not say it) and the [source] of the default.
        within: the range of a number, or of each number of a list; values that are given are checked against it.
        affects_result: False for settings that change only logging, checks, what is computed again or how often a state
            is saved; changing them does not make an artifact stale.
        absent_means: of a setting that was added later, the plain value with which an artifact is the same as one made
            before there was the setting; such an artifact is then not stale.
    """
    metadata = {"doc": doc, "within": within, "affects_result": affects_result, "absent_means": absent_means}
    return dataclasses.field(default=default, metadata=metadata)


def setting_of(section: type, name: str, default: Any = dataclasses.MISSING) -> Any:
    """Declare the setting `name` of another section again: the same meaning and range, and default unless one is given.
    """
    field = section.__dataclass_fields__[name]
    return dataclasses.field(default=field.default if default is dataclasses.MISSING else default,
                             metadata=field.metadata)


def to_dict(settings: Any) -> dict:
    """Convert settings to plain JSON values: tuples become lists, dataclasses mappings."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def result_settings(settings: Any) -> dict:
    """Convert settings to plain JSON values, without those that do not affect the result."""
    return {name: value for name, value in to_dict(settings).items() if name not in list_without_effect(settings)}


def absent_values(settings: Any) -> dict:
    """Return the values that count for settings which an older artifact lacks, by name; for None, nothing."""
    fields = dataclasses.fields(settings) if settings else ()
    values = {field.name: field.metadata["absent_means"] for field in fields}
    return {name: value for name, value in values.items() if value is not dataclasses.MISSING}


def complete_settings(settings: Any, values: dict) -> dict:
    """Return the values of an artifact or recipe of an earlier version as this version has them.

    Those that it lacks are added (`absent_means`); those that were removed are left out where nothing else is computed.
    """
    return absent_values(settings) | drop_removed(values)


def compared_settings(settings: Any) -> dict:
    """Convert settings to plain JSON values, without those at which an artifact is the same as one that lacks them.

    These tell Snakemake which artifacts are stale: a setting that is added later leaves older ones as they are.
    """
    absent = absent_values(settings)
    return {name: value for name, value in result_settings(settings).items()
            if name not in absent or value != absent[name]}


def list_without_effect(settings: Any) -> set[str]:
    """List the names of the fields that do not affect the result; for None, the empty set."""
    fields = dataclasses.fields(settings) if settings else ()
    return {field.name for field in fields if not field.metadata["affects_result"]}


def override(settings: Any, values: dict, where: str, *, from_text: bool = False) -> Any:
    """Return a copy of `settings` with `values` in place of its own; a nested section keeps what `values` leaves out.

    Args:
        where: where the values come from, for error messages.
        from_text: convert text to the field's type (command line, Snakemake); otherwise text for a number is an error.
    """
    hints = typing.get_type_hints(type(settings))
    ranges = {field.name: field.metadata["within"] for field in dataclasses.fields(settings)}
    changes = {}
    for key, value in drop_removed(values).items():
        if key not in hints:
            raise SettingsError(f"{where}: unknown key {key!r}{suggest(key, hints)}")
        current, path = getattr(settings, key), f"{where}: {key}"
        if dataclasses.is_dataclass(current):
            if not isinstance(value, dict):
                raise SettingsError(f"{path} is a section: give it as {{name: value}}, not {value!r}"
                                    f"{_braces_hint(key, value)}")
            changes[key] = override(current, value, path, from_text=from_text)
        else:
            changes[key] = _convert(hints[key], value, path, from_text)
            _check_range(ranges[key], changes[key], path)
    try:
        return dataclasses.replace(settings, **changes)
    except SettingsError:
        raise
    except ValueError as error:  # a check across fields, in __post_init__
        raise SettingsError(f"{where}: {error}") from None


def flatten(settings: Any) -> list[tuple[str, Any, str]]:
    """List (dotted name, plain value, doc) of every setting, nested sections included.

    A list of sections is one value.
    """
    return [(name, _plain(value), field.metadata["doc"]) for name, field, value in list_fields(settings)]


def list_fields(settings: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field, Any]]:
    """Yield the dotted name, the field and the value of every setting, nested sections included, LISTED_LAST last."""
    for field in sorted(dataclasses.fields(settings), key=lambda field: field.name in LISTED_LAST):
        value, name = getattr(settings, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from list_fields(value, f"{name}.")
        else:
            yield name, field, value


def nest(flat: dict[str, Any]) -> dict:
    """Turn dotted names into nested mappings: {'lora.r': 4} to {'lora': {'r': 4}}."""
    tree: dict = {}
    for dotted, value in flat.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def suggest(key: str, known: Iterable[str], *, else_all: bool = True, alike: float = 0.5) -> str:
    """Return the end of an error message: advice on a removed key, the most similar of the known ones, all, or nothing.

    alike: the least similarity, of 1 (difflib).
    """
    removed = REMOVED_SETTINGS.get(str(key).removeprefix("--").replace("-", "_"))
    if removed:
        return f": it was removed; {removed.advice}"
    known = list(known)
    close = difflib.get_close_matches(str(key), known, n=1, cutoff=alike)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known keys: {', '.join(known)}" if else_all else ""


def _check_range(within: Range | None, value: Any, path: str) -> None:
    """Raise SettingsError if the number, or a number of the list, is outside of its range; None is inside."""
    for number in value if isinstance(value, tuple) else (value,):
        if within and number is not None and number not in within:
            raise SettingsError(f"{path} must be {within}, not {reprlib.repr(number)}")


def _convert(hint: Any, value: Any, path: str, from_text: bool) -> Any:
    """Return the value as the type `hint`; SettingsError if it is not one."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # X | None
        if value is None or (from_text and value in ("null", "none", "None", "")):
            return None
        return _convert(next(a for a in arguments if a is not type(None)), value, path, from_text)
    if origin is Literal:
        if value is False and "off" in arguments:  # YAML reads off as false
            return "off"
        if value not in arguments:
            raise SettingsError(f"{path} must be one of {', '.join(map(repr, arguments))}, not {value!r}")
        return value
    if origin is tuple and dataclasses.is_dataclass(arguments[0]):
        return _convert_sections(arguments[0], value, path, from_text)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise SettingsError(f"{path} must be a list, not {value!r}")
        return tuple(_convert(arguments[0], item, path, from_text) for item in items)
    return _convert_scalar(hint, value, path, from_text)


def _convert_sections(kind: type, value: Any, path: str, from_text: bool) -> tuple:
    """Convert a list of mappings, each an override of the defaults of `kind`; text is parsed as YAML."""
    items = _parse_yaml(value) if from_text and isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, dict) for item in items):
        known = ", ".join(field.name for field in dataclasses.fields(kind))
        raise SettingsError(f"{path} must be a list of mappings, as [{{name: value}}] with names of {known}, "
                            f"not {value!r}")
    return tuple(override(kind(), item, f"{path}, entry {number}", from_text=from_text)
                 for number, item in enumerate(items, 1))


def _parse_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _convert_scalar(hint: type, value: Any, path: str, from_text: bool) -> Any:
    if isinstance(value, str) and hint is not str:
        value = _parse(hint, value) if from_text else _parse_exponent(hint, value)
    if hint is str and isinstance(value, date):  # YAML reads 2015-01-31 as one
        return value.isoformat()
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return _to_float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise SettingsError(f"{path} must be {TYPE_NAMES[hint]}, not {value!r}{_quotes_hint(hint, value)}")


def _to_float(number: int) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _parse(hint: type, text: str) -> Any:
    """Return the text as a value of the type `hint`, or else unchanged."""
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text)
    except ValueError:
        return _parse_exponent(hint, text)


def _parse_exponent(hint: type, text: str) -> Any:
    """Return 1e-5, which YAML reads as text, as a number, and 1e6 also as a whole one; other text unchanged."""
    if hint not in (int, float) or not EXPONENT.fullmatch(text):
        return text
    number = float(text)
    if hint is float:
        return number
    return int(number) if number.is_integer() else text


def _braces_hint(key: str, value: Any) -> str:
    """Show the right form of learning_rate=1e-5, given as the value of a section, or of what a shell makes of braces.
    """
    match = re.fullmatch(r"(\w+) *[=:] *(.*)", value) if isinstance(value, str) else None
    return f"; write, with the quotes, '{key}={{{match[1]}: {match[2]}}}'" if match else ""


def _quotes_hint(hint: type, value: Any) -> str:
    if hint not in (int, float) or not isinstance(value, str):
        return ""
    try:
        hint(value)
    except ValueError:
        return ""
    return " (drop the quotes)"
