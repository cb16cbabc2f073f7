"""Mappings and text to frozen dataclasses, strictly: an unknown key or a wrong type is one clear line."""

import dataclasses
import difflib
import types
import typing
from datetime import date
from typing import Any, Literal, Union

import yaml


class SettingsError(ValueError):
    """A user's setting is wrong; the message is one line that says where and what to do."""


def setting(default: Any, doc: str, decides: bool = True) -> Any:
    """A dataclass field with its default and one line of meaning, unit and source.

    decides: whether another value makes another result, and so the work stale; False: it says how one looks on.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "decides": decides})


def to_dict(settings: Any) -> dict:
    """Plain JSON values (tuples become lists, dataclasses mappings, in lists too)."""
    return {field.name: _plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}


def result_settings(settings: Any) -> dict:
    """`as_dict` without the fields that change nothing of what comes out."""
    return {name: value for name, value in to_dict(settings).items() if name not in logging_only(settings)}


def logging_only(settings: Any) -> set[str]:
    """Names of the fields that `deciding` leaves out; None has no fields."""
    every = dataclasses.fields(settings) if settings else ()
    return {field.name for field in every if not field.metadata["decides"]}


def override(settings: Any, values: dict, where: str, *, from_text: bool = False) -> Any:
    """A copy of `settings` with `values` laid over it; nested sections are laid over their own present values.

    from_text: text is converted by the field's type (command line, Snakemake); otherwise text for a number is refused.
    """
    hints = typing.get_type_hints(type(settings))
    changes = {}
    for key, value in values.items():
        if key not in hints:
            removed = getattr(settings, "REMOVED_KEYS", {}).get(key)
            advice = f": it was removed; {removed}" if removed else suggest(key, hints)
            raise SettingsError(f"{where}: unknown key {key!r}{advice}")
        present = getattr(settings, key)
        place = f"{where}: {key}"
        if dataclasses.is_dataclass(present):
            if not isinstance(value, dict):
                raise SettingsError(f"{place} is a section: give it as {{name: value}}, not {value!r}")
            changes[key] = override(present, value, place, from_text=from_text)
        else:
            changes[key] = _typed(hints[key], value, place, from_text)
    try:
        return dataclasses.replace(settings, **changes)
    except SettingsError:
        raise
    except ValueError as error:  # a check across fields, in __post_init__
        raise SettingsError(f"{where}: {error}") from None


def flatten(settings: Any, prefix: str = "") -> list[tuple[str, Any, str]]:
    """(dotted name, present plain value, doc) of every value, nested sections unfolded; a list of them is a value."""
    found = []
    for field in dataclasses.fields(settings):
        value, name = getattr(settings, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            found += flatten(value, name + ".")
        else:
            found.append((name, _plain(value), field.metadata["doc"]))
    return found


def nest(flat: dict[str, Any]) -> dict:
    """{'lora.r': 4} to {'lora': {'r': 4}}."""
    tree: dict = {}
    for dotted, value in flat.items():
        *path, last = dotted.split(".")
        branch = tree
        for part in path:
            branch = branch.setdefault(part, {})
        branch[last] = value
    return tree


def suggest(key: str, known) -> str:
    close = difflib.get_close_matches(str(key), list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(known)}"


def _typed(hint: Any, value: Any, place: str, from_text: bool) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # X | None
        if value is None or (from_text and value in ("null", "none", "None", "")):
            return None
        return _typed(next(a for a in arguments if a is not type(None)), value, place, from_text)
    if origin is Literal:
        if value not in arguments:
            raise SettingsError(f"{place} must be one of {', '.join(map(repr, arguments))}, not {value!r}")
        return value
    if origin is tuple and dataclasses.is_dataclass(arguments[0]):
        return _sections(arguments[0], value, place, from_text)
    if origin is tuple:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, list | tuple):
            raise SettingsError(f"{place} must be a list, not {value!r}")
        return tuple(_typed(arguments[0], item, place, from_text) for item in items)
    return _scalar(hint, value, place, from_text)


def _sections(kind: type, value: Any, place: str, from_text: bool) -> tuple:
    """A list of mappings, each laid over the defaults of `kind`; text (a command line's) is read as YAML."""
    items = _read(value) if from_text and isinstance(value, str) else value
    if not isinstance(items, list | tuple) or not all(isinstance(item, dict) for item in items):
        known = ", ".join(field.name for field in dataclasses.fields(kind))
        raise SettingsError(f"{place} must be a list of mappings, as [{{name: value}}] with names of {known}, "
                            f"not {value!r}")
    return tuple(override(kind(), item, f"{place}, entry {number}", from_text=from_text)
                 for number, item in enumerate(items, 1))


def _read(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_dict(value)
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _scalar(hint: type, value: Any, place: str, from_text: bool) -> Any:
    if from_text and isinstance(value, str) and hint is not str:
        value = _from_text(hint, value)
    if hint is str and isinstance(value, date):  # YAML reads 2015-01-31 as one
        return value.isoformat()
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, hint) and not (hint is int and isinstance(value, bool)):
        return value
    raise SettingsError(f"{place} must be {_KIND[hint]}, not {value!r}{_yaml_hint(hint, value)}")


_KIND = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _from_text(hint: type, text: str) -> Any:
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text)
    except ValueError:
        return text


def _yaml_hint(hint: type, value: Any) -> str:
    if hint not in (int, float) or not isinstance(value, str):
        return ""
    try:
        number = float(value)
    except ValueError:
        return ""
    if "e" in value.lower() and "." not in value:
        return f" (YAML reads {value} as text: write {number:.1e})".replace("e+0", "e+").replace("e-0", "e-")
    return " (drop the quotes)"
