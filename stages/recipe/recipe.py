"""Every setting of every stage, and recipe files. Defaults are StackLLaMA's published values; a file lists differences.

The doc of each setting has its meaning, its unit (where the name does not say it) and the source of the default:
[paper] the StackLLaMA blog post (Hugging Face, 2023), [script] TRL's examples/research_projects/stack_llama/scripts,
[run] that folder's README, [card] the data set cards, [ours] chosen here.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from stages.recipe.schema import (
    SettingsError,
    compared_settings,
    flatten,
    list_without_effect,
    override,
    setting,
    suggest,
)
from stages.recipe.sections.data import Pairs, Posts
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.evaluate import Evaluate, Frontier, Report
from stages.recipe.sections.ilql import Ilql
from stages.recipe.sections.models import Base, Merge
from stages.recipe.sections.policy_gradient import Grpo, Rloo
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.rejection_sampling import BestOfN, ExpertIteration
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.sft import Sft

FOLDER = Path("configs")
ENDINGS = (".yaml", ".yml", ".json")

DEFAULT_RECIPE = "configs/demo.yaml"  # for the bundled site
REAL_SITES_RECIPE = "configs/sites.yaml"  # for another dump, with a base trained from scratch
PRETRAINED_RECIPE = "configs/smollm2.yaml"  # likewise, with a small pretrained base
# Keys beside the sections; they set the value in every section that has it.
SHARED = ("seed", "cpu_kernels", "save_every_minutes", "log_to")


@dataclass(frozen=True)
class Recipe:
    """A whole run."""

    name: str = setting("stackllama", "name of the run; results go to results/NAME/")
    dump: tuple[str, ...] = setting((), "folders, Posts.xml files, .7z archives, parquet folders or hub ids")
    prompts: str | None = setting(
        None, "your own prompts in place of a dump, for ppo, rloo, grpo: a .jsonl, .parquet or .txt file, or a folder")
    posts: Posts = setting(Posts(), "dump to questions with scored answers")
    pairs: Pairs = setting(Pairs(), "questions to preference pairs")
    base: Base = setting(Base(), "the pretrained model")
    sft: Sft = setting(Sft(), "supervised fine-tuning")
    reward: Reward = setting(Reward(), "reward model")
    merge: Merge = setting(Merge(), "merge adapters into the base weights, for sft, reward and ppo")
    ppo: Ppo = setting(Ppo(), "policy optimisation")
    dpo: Dpo = setting(Dpo(), "direct preference optimisation")
    rloo: Rloo = setting(Rloo(), "policy optimisation by RLOO, in place of ppo")
    grpo: Grpo = setting(Grpo(), "policy optimisation by GRPO, in place of ppo")
    best_of_n: BestOfN = setting(BestOfN(), "rejection sampling: the best of several answers of the SFT model")
    expert_iteration: ExpertIteration = setting(ExpertIteration(), "fine-tuning on the best sampled answers, in rounds")
    ilql: Ilql = setting(Ilql(), "offline reinforcement learning from scored answers")
    frontier: Frontier = setting(Frontier(), "ways to align, compared at equal KL")
    evaluate: Evaluate = setting(Evaluate(), "held-out evaluation")
    report: Report = setting(Report(), "the report page")


def load_recipe(path: str | Path, overrides: dict | None = None) -> Recipe:
    """Load a recipe file, given by its path or its name in configs/, and apply overrides.

    Without a name in the file, the recipe is named after the file.

    The keys in SHARED beside the sections apply to every section that has them. Values of `overrides` may be text,
    which is converted to the field's type (Snakemake passes nested --config values as text); values of the file may
    not. Raises SettingsError.
    """
    file = find_recipe(path)
    recipe = _apply_values(Recipe(name=file.stem), read_mapping(file), str(file), from_text=False)
    return _apply_values(recipe, overrides or {}, "--config", from_text=True)


def _apply_values(recipe: Recipe, values: dict, where: str, from_text: bool) -> Recipe:
    values = dict(values)
    for key in SHARED:
        if key in values:
            value = values.pop(key)
            sections = [f.name for f in fields(recipe) if hasattr(getattr(recipe, f.name), key)]
            recipe = replace(recipe, **{
                name: override(getattr(recipe, name), {key: value}, where, from_text=from_text) for name in sections})
    return override(recipe, values, where, from_text=from_text)


def section_settings(recipe: Recipe, name: str) -> dict:
    """Return one section as plain values, for the `params` of a Snakemake rule: what makes an artifact stale."""
    return compared_settings(getattr(recipe, name))


def list_defaults(name: str) -> list[tuple]:
    """List (dotted name, plain default, doc) of every setting of a section that a manifest records."""
    settings = getattr(Recipe(), name)
    return [row for row in flatten(settings) if row[0] not in list_without_effect(settings)]


def select_settings(kind: type, settings: object) -> dict:
    """Return the settings that the dataclass `kind` has fields for, as its keyword arguments.

    What a section fixes (RLOO has no critic) is an attribute of its class that is no setting, so that no value has a
    second default here.
    """
    return {field.name: getattr(settings, field.name) for field in fields(kind)}


def find_recipe(recipe: Any) -> Path:
    """Return the path of a recipe file; NAME without a folder or an ending is configs/NAME.yaml."""
    if not isinstance(recipe, str | int | float | Path) or isinstance(recipe, bool) or not str(recipe):
        raise SettingsError(f"recipe must be a file or the name of one in {FOLDER}/, not {recipe!r}")
    path = Path(recipe if isinstance(recipe, Path) else str(recipe))
    named = FOLDER / f"{path}.yaml"
    if path.name == str(path) and path.suffix not in ENDINGS and os.path.isfile(named):
        return named
    if not os.path.exists(path):  # unlike Path.exists, it accepts names that no file system allows
        known = sorted(FOLDER.glob("*.yaml"))
        names = [str(file) if path.suffix in ENDINGS else file.stem for file in known]
        raise SettingsError(f"no recipe at {path}; there are: {', '.join(map(str, known))}"
                            f"{suggest(str(path), names, else_all=False)}")
    return path


def read_mapping(path: Path) -> dict:
    """Read a YAML file of names and values; SettingsError, in one line, for everything else. An empty file is {}.

    A name that a mapping has twice is refused: YAML would drop the first, and all that is beneath it.
    """
    try:
        text = path.read_text(encoding="utf-8")
        repeated = find_repeated_key(text)
        values = yaml.safe_load(text)
    except IsADirectoryError:
        raise SettingsError(f"{path} is a folder: a recipe is one YAML file") from None
    except OSError as error:
        raise SettingsError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"{path} is not YAML: it is no text (UTF-8)") from None
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date such as 2015-02-31
        raise SettingsError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise SettingsError(f"{path} is nested too deeply") from None
    if repeated:
        name, first, second = repeated
        raise SettingsError(f"{path} has {name!r} twice, in lines {first} and {second}: give it once, with all its "
                            f"values")
    if values is not None and not isinstance(values, dict):
        raise SettingsError(f"{path} must map names to values")
    return values or {}


def find_repeated_key(text: str) -> tuple[str, int, int] | None:
    """Find a name that a mapping of a YAML text has twice, at any depth; return it and both line numbers, from 1.

    Raises yaml.YAMLError, and RecursionError of a text that is nested too deeply.
    """
    root = yaml.compose(text, yaml.SafeLoader)
    return next(_repeated_keys(root, set()), None) if root else None


def _repeated_keys(node: yaml.Node, visited: set[int]) -> Iterator[tuple[str, int, int]]:
    if isinstance(node, yaml.ScalarNode) or id(node) in visited:  # visited: an alias
        return
    visited.add(id(node))
    lines: dict[tuple[str, str], int] = {}
    for child in node.value:
        key, value = child if isinstance(node, yaml.MappingNode) else (None, child)
        if isinstance(key, yaml.ScalarNode):
            line, name = key.start_mark.line + 1, (key.tag, key.value)
            if name in lines:
                yield key.value, lines[name], line
            lines[name] = line
        yield from _repeated_keys(value, visited)
