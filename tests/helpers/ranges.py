"""The ranges of a recipe's settings."""

from typing import Any

from stages.recipe.ranges import Range
from stages.recipe.schema import list_fields


def list_ranges(settings: Any) -> dict[str, Range]:
    """Map the dotted name of every setting that has a range to it, nested sections included."""
    return {name: field.metadata["within"] for name, field, _ in list_fields(settings) if field.metadata["within"]}
