"""Every setting of every stage. Defaults are StackLLaMA's published values; a recipe file lists differences.

The doc of each setting has its meaning, its unit (where the name does not say it) and the source of the default:
[paper] the StackLLaMA blog post (Hugging Face, 2023), [script] TRL's examples/research_projects/stack_llama/scripts,
[run] that folder's README, [card] the data set cards, [ours] chosen here.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from stages.recipe.recipe_file import find_recipe, read_mapping
from stages.recipe.schema import compared_settings, flatten, list_without_effect, override, setting
from stages.recipe.sections.best_of_n import BestOfN
from stages.recipe.sections.data import Pairs, Posts
from stages.recipe.sections.dpo import Dpo
from stages.recipe.sections.evaluate import Evaluate, Report
from stages.recipe.sections.expert_iteration import ExpertIteration
from stages.recipe.sections.frontier import Frontier
from stages.recipe.sections.grpo import Grpo
from stages.recipe.sections.ilql import Ilql
from stages.recipe.sections.models import Base, Merge
from stages.recipe.sections.ppo import Ppo
from stages.recipe.sections.reward import Reward
from stages.recipe.sections.rloo import Rloo
from stages.recipe.sections.sft import Sft

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
