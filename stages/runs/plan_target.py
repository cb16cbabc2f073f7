"""Let `snakemake plan` run without a dump, without cores and without a run's folder: what --config takes for it."""

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import yaml

from stages.recipe.algorithms import list_targets
from stages.recipe.recipe import Recipe
from stages.recipe.schema import to_dict
from stages.runtime.files import write_text

NAME = "plan"
KEYS = ("algorithm", "device", "device_memory_gib", "device_tflops", "devices", "model_flops_share", "pairs_artifact")
RECIPE_FILE = Path(".snakemake/plan/recipe.yaml")
FLAGS = {"pairs_artifact": "--pairs"}  # `pairs` is a section of the recipe


def plans_only(words: Sequence[str]) -> bool:
    """Tell whether Snakemake's command line asks for the plan and for no other target."""
    return NAME in words and not {word.removesuffix("_train") for word in words} & set(list_targets())


def take_options(config: dict) -> list[str]:
    """Take the options of stages/plan.py out of the values of --config, and return them as its command line."""
    named = [(key, config.pop(key)) for key in KEYS if key in config]
    return [f"{FLAGS.get(key, '--' + key.replace('_', '-'))}={value}" for key, value in named]


def write_recipe(recipe: Recipe) -> Path:
    """Write the resolved recipe where the plan reads it; a plan leaves nothing in results/."""
    RECIPE_FILE.parent.mkdir(parents=True, exist_ok=True)
    write_text(RECIPE_FILE, yaml.safe_dump(to_dict(recipe), sort_keys=False, allow_unicode=True))
    return RECIPE_FILE


def start_plan(run: str, folders: Iterable[Path], threads: int) -> None:
    """Print in the background what the stages of a run will take, by the same plan; nothing if that fails.

    folders: of the artifacts that the run makes. threads: of a stage.
    """
    names = dict.fromkeys(folder.name for folder in folders if folder.parent == Path(run))
    if names:
        words = [sys.executable, "-m", "stages.plan", "--recipe", f"{run}/recipe.yaml", "--stages", *names]
        with suppress(OSError):
            subprocess.Popen(words, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, stdin=subprocess.DEVNULL,
                             stdout=subprocess.DEVNULL, start_new_session=True)
