"""Choose the recipe of a run that names none, and say what to expect of it."""

import os
from collections.abc import Sequence
from pathlib import Path

from stages.recipe.checks import SCRATCH
from stages.recipe.recipe import DEFAULT_RECIPE, PRETRAINED_RECIPE, REAL_SITES_RECIPE, Recipe, load_recipe
from stages.runs.dump_paths import list_sources

# What a run without a named recipe says first; docs/results.md has the measurements.
FETCH = "A real base is one command away, and this dump then takes it: make smollm2 (93 MB, once)."
SCRATCH_BASE = (
    "What to expect: the base model is trained from scratch on this dump alone. Its answers have the site's style, "
    "not its knowledge.",
    "What it costs: 26 minutes of CPU time on one core for a site of 1,000 questions (measured on beer). "
    "More text takes longer, up to base.scratch.max_tokens.",
    "Any other pretrained model is an option: --config 'base={model: FOLDER-OR-HUB-ID}', "
    "for example HuggingFaceTB/SmolLM2-135M.",
)
PRETRAINED_BASE = (
    "Its learning rates suit models below a billion parameters: for a larger one, see configs/stackllama.yaml.",
)


def choose_default_recipe(dump: str | Sequence[str] | None, model: str | None = None) -> str:
    """Return the recipe of a run that names none. The settings of the bundled site suit no other dump.

    Args:
        model: base.model, if the command line names one; None: the real base of PRETRAINED_RECIPE if it is there.
    """
    if dump is None or _absolute_paths(dump) == _absolute_paths(load_recipe(DEFAULT_RECIPE).dump):
        return DEFAULT_RECIPE
    is_pretrained = model != SCRATCH if model else Path(load_recipe(PRETRAINED_RECIPE).base.model).is_dir()
    return PRETRAINED_RECIPE if is_pretrained else REAL_SITES_RECIPE


def named_model(values: dict) -> str | None:
    """Return base.model of --config's values, None if they name none."""
    base = values.get("base")
    return base.get("model") if isinstance(base, dict) else base


def introduce_default_recipe(config: dict, config_files: Sequence[Path], recipe: Recipe) -> str:
    """Say which recipe was chosen for a dump without one, what it costs and what to expect; empty if one was named.

    The first line is the command that fetches a real base, if the base is trained from scratch for want of one.
    """
    if "recipe" in config or config_files or "dump" not in config:
        return ""
    is_scratch = recipe.base.model == SCRATCH
    path = choose_default_recipe(config["dump"], recipe.base.model)
    if path == DEFAULT_RECIPE:
        return ""
    fetch = [FETCH] if is_scratch and named_model(config) is None else []
    words = f"No recipe is named: {path} is taken, for small real sites, with the base {recipe.base.model}."
    first, *rest = [*fetch, words, *(SCRATCH_BASE if is_scratch else PRETRAINED_BASE)]
    return "\n  ".join([first, *rest])


def _absolute_paths(dump: str | Sequence[str]) -> set[str]:
    return {os.path.abspath(source) for source in list_sources(dump)}
