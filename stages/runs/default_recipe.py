"""Choose the recipe of a run that names none, and say what to expect of it."""

import os
from collections.abc import Sequence
from pathlib import Path

from stages.recipe.recipe import DEFAULT_RECIPE, REAL_SITES_RECIPE, Recipe, load_recipe
from stages.runs.dump_paths import list_sources

# What a run without a named recipe says first; docs/results.md has the measurements.
SCRATCH_BASE = (
    "What to expect: the base model is trained from scratch on this dump alone. Its answers have the site's style, "
    "not its knowledge.",
    "What it costs: 26 minutes of CPU time on one core for a site of 1,000 questions (measured on beer). "
    "More text takes longer, up to base.scratch.max_tokens.",
    "A pretrained model is one option away: --config 'base={model: FOLDER-OR-HUB-ID}', "
    "for example HuggingFaceTB/SmolLM2-135M.",
)
PRETRAINED_BASE = (
    "Its learning rates suit models below a billion parameters: for a larger one, see configs/stackllama.yaml.",
)


def choose_default_recipe(dump: str | Sequence[str] | None) -> str:
    """Return the recipe of a run that names none. The settings of the bundled site suit no other dump."""
    if dump is None or _absolute_paths(dump) == _absolute_paths(load_recipe(DEFAULT_RECIPE).dump):
        return DEFAULT_RECIPE
    return REAL_SITES_RECIPE


def introduce_default_recipe(config: dict, config_files: Sequence[Path], recipe: Recipe) -> str:
    """Say which recipe was chosen for a dump without one, what it costs and what to expect; empty if one was named."""
    named = "recipe" in config or config_files or "dump" not in config
    if named or choose_default_recipe(config["dump"]) != REAL_SITES_RECIPE:
        return ""
    lines = [f"No recipe is named: {REAL_SITES_RECIPE} is taken, for small real sites."]
    return "\n  ".join([*lines, *(SCRATCH_BASE if recipe.base.model == "scratch" else PRETRAINED_BASE)])


def _absolute_paths(dump: str | Sequence[str]) -> set[str]:
    return {os.path.abspath(source) for source in list_sources(dump)}
