"""Every hyper-parameter of every stage. Defaults are StackLLaMA's published values; a recipe file lists differences.

Each field says its meaning, its unit (where the name does not) and where the default comes from:
[paper] the StackLLaMA blog post (Hugging Face, 2023), [script] TRL's examples/research_projects/stack_llama/scripts,
[run] that folder's README, [card] the data set cards, [ours] chosen here.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

import yaml

from stages.recipe.data import Pairs, Posts
from stages.recipe.evaluate import Evaluate, Report
from stages.recipe.models import Base, Merge
from stages.recipe.ppo import Ppo
from stages.recipe.reward import Reward
from stages.recipe.schema import SettingsError, flatten, logging_only, override, result_settings, setting
from stages.recipe.sft import Sft

DEFAULT_RECIPE = "configs/demo.yaml"
SHARED = ("seed", "log_to")  # given once beside the sections, they go to every section that has them


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str = setting("stackllama", "results go to results/<name>/")
    dump: tuple[str, ...] = setting((), "folders, Posts.xml files, .7z archives, parquet folders or hub ids")
    posts: Posts = setting(Posts(), "dump to posts")
    pairs: Pairs = setting(Pairs(), "posts to pairs")
    base: Base = setting(Base(), "the pretrained model")
    sft: Sft = setting(Sft(), "supervised fine-tuning")
    reward: Reward = setting(Reward(), "reward model")
    merge: Merge = setting(Merge(), "adapter into base, for sft, reward and ppo")
    ppo: Ppo = setting(Ppo(), "policy optimisation")
    evaluate: Evaluate = setting(Evaluate(), "held-out evaluation")
    report: Report = setting(Report(), "the page at the end")


def load_recipe(path: str | Path, overrides: dict | None = None) -> Recipe:
    """Recipe file, then overrides laid over it. A file that gives no name is named after itself.

    Keys beside the sections are `seed` and `log_to`, which every section that has them takes.
    Values of `overrides` may be text (Snakemake hands nested --config values over as strings): they are converted
    by the field's type. Values of the file may not. Raises SettingsError with one line for people.
    """
    recipe = _with_shared(Recipe(name=Path(path).stem), _read_yaml(Path(path)), str(path), from_text=False)
    return _with_shared(recipe, overrides or {}, "--config", from_text=True)


def _with_shared(recipe: Recipe, values: dict, where: str, from_text: bool) -> Recipe:
    values = dict(values)
    for key in SHARED:
        if (value := values.pop(key, None)) is not None:
            taking = [f.name for f in fields(recipe) if hasattr(getattr(recipe, f.name), key)]
            recipe = replace(recipe, **{
                name: override(getattr(recipe, name), {key: value}, where, from_text=from_text) for name in taking})
    return override(recipe, values, where, from_text=from_text)


def _read_yaml(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        known = ", ".join(sorted(str(p) for p in Path("configs").glob("*.yaml")))
        raise SettingsError(f"no recipe at {path}; there are: {known}") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values or {}, dict):
        raise SettingsError(f"{path} must map names to values")
    return values or {}


def select_settings(kind: type, settings: object) -> dict:
    """The settings that the dataclass `kind` has fields for."""
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


def section_settings(recipe: Recipe, name: str) -> dict:
    """One section as plain values: what a Snakemake rule holds in `params` and a manifest records.

    Without what changes nothing of the result, so that a change of it makes nothing stale.
    """
    return result_settings(getattr(recipe, name))


def list_defaults(name: str) -> list[tuple]:
    """Every setting of one section that a manifest records: dotted name, default as a plain value, meaning with its
    source."""
    settings = getattr(Recipe(), name)
    return [leaf for leaf in flatten(settings) if leaf[0] not in logging_only(settings)]
