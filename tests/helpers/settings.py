"""Slices of a section for tests: its own values, with a few changed."""

from typing import Any

from stages.recipe.recipe import select_settings
from stages.recipe.sections.ppo import Ppo
from stages.rewards.shaping import ShapingSettings


def take_settings(kind: type, section: Any, **changes: Any) -> Any:
    """Build the dataclass `kind` from the section's values."""
    return kind(**select_settings(kind, section) | changes)


def shaping(**changes: Any) -> ShapingSettings:
    """Return the settings of a reward as the sum is, without a penalty, but for the changes."""
    return take_settings(ShapingSettings, Ppo(missing_eos_penalty=0.0), **changes)
