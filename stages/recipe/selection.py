"""Hand the settings of a section to a part of the program, which takes its own dataclass of them."""

from dataclasses import fields


def select_settings(kind: type, settings: object) -> dict:
    """Return the settings that the dataclass `kind` has fields for, as its keyword arguments.

    What a section fixes (RLOO has no critic) is an attribute of its class that is no setting, so that no value has a
    second default here.
    """
    return {field.name: getattr(settings, field.name) for field in fields(kind)}
