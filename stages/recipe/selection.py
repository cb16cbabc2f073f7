"""Hand the settings of a section to a part of the program, which takes its own dataclass of them."""

from dataclasses import MISSING, fields


def select_settings(kind: type, settings: object) -> dict:
    """Return the settings that the dataclass `kind` has fields for, as its keyword arguments.

    A section may lack what has a default in `kind`: RLOO has no critic's settings.
    """
    return {field.name: getattr(settings, field.name) for field in fields(kind)
            if field.default is MISSING or hasattr(settings, field.name)}
