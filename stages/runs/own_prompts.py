"""Runs on the user's own prompts, without a dump: what --config takes, and which targets there are."""

import os
from collections.abc import Sequence
from dataclasses import replace

from stages.recipe import algorithms
from stages.recipe.checks import SCRATCH
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError
from stages.runs.dump_paths import SNAKEMAKE_SYNTAX, normalize_source

ALGORITHMS = {name: algorithm for name, algorithm in algorithms.ALGORITHMS.items() if algorithm.is_policy_gradient}
NEED_PAIRS = ("model", "lexical")  # sources of rewards


def expand_base(values: dict) -> dict:
    """Return --config's values with base=MODEL, which means base={model: MODEL}, written out."""
    base = values.get("base")
    return values | ({"base": {"model": base}} if isinstance(base, str) and "=" not in base else {})


def resolve_prompts(recipe: Recipe, dump: object) -> Recipe:
    """Return a recipe with prompts with their path in its one spelling, and without a dump.

    Args:
        dump: of --config.
    """
    if dump is not None:
        raise SettingsError(f"--config: a run has a dump or prompts, not both: give dump=... or prompts=..., and a "
                            f"recipe without the other (prompts: {recipe.prompts})")
    if not os.path.exists(os.path.expanduser(recipe.prompts)):
        raise SettingsError(f"prompts: there is no {recipe.prompts!r}")
    if SNAKEMAKE_SYNTAX & set(recipe.prompts):
        raise SettingsError(f"prompts: Snakemake reads braces and < > in a path as variables: rename "
                            f"{recipe.prompts!r}")
    if recipe.base.model == SCRATCH:
        raise SettingsError("prompts: a run on them starts from a pretrained model: add base=FOLDER-OR-HUB-ID "
                            "('scratch' would be trained on a dump)")
    return replace(recipe, prompts=normalize_source(recipe.prompts), dump=())


def check_targets(recipe: Recipe, words: Sequence[str], rules: Sequence[str], others: Sequence[str]) -> None:
    """Raise SettingsError for a target that needs pairs, or an algorithm whose settings do.

    Args:
        words: Snakemake's command line.
        rules: the targets of this run.
        others: targets that runs on a dump have.
    """
    refused = next((word for word in words if word in others and word not in rules), None)
    if refused:
        raise SettingsError(f"{refused!r} needs pairs of answers, which a run on your own prompts "
                            f"({recipe.prompts}) has not; its targets are {', '.join(rules)}")
    stages = {algorithm.rule_name(stage): name for name, algorithm in ALGORITHMS.items()
              for stage in (algorithms.EVALUATE, algorithms.REPORT)}
    named = [name for name in rules if name in words] or [algorithms.FIRST]
    for name in {stages.get(word, word.removesuffix("_merged")) for word in named} & set(ALGORITHMS):
        section = getattr(recipe, name)
        source = next((entry.source for entry in section.rewards if entry.source in NEED_PAIRS), None)
        if source:
            raise SettingsError(f"{name}.rewards names {source!r}, which learns from pairs, and a run on your own "
                                f"prompts has none: set it, as '{name}={{rewards: \"[{{source: "
                                f"package.module:function}}]\"}}'")
        if getattr(section, "value_model", "head") != "head":
            raise SettingsError(f"{name}.value_model {section.value_model!r} starts from a reward model, and a run on "
                                f"your own prompts has none: set it to 'head'")
