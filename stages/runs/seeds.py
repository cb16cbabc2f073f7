"""Run a recipe with several seeds: `--config 'seeds=[0, 1, 2]'`.

Questions are made once, in results/NAME/posts. Everything from the split on is made once a seed, in
results/NAME/seed-N, which is a run of its own with a recipe.yaml. Without seeds there is one run, results/NAME.
"""

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from stages.recipe.ranges import SEED
from stages.recipe.recipe import Recipe
from stages.recipe.schema import SettingsError

KEY = "seeds"
WILDCARD = "{seed}"
MAX_SEEDS = 1000


@dataclass(frozen=True)
class SeededRuns:
    """The runs of one command line.

    root: results/NAME. recipes: by seed; empty if there is one run.
    """

    root: str
    recipes: dict[int, Recipe] = field(default_factory=dict)

    @property
    def folder(self) -> str:
        """Return the folder of a run; of several, with Snakemake's wildcard for the seed."""
        return f"{self.root}/seed-{WILDCARD}" if self.recipes else self.root

    @property
    def pattern(self) -> str:
        """Return what the wildcard matches."""
        return "|".join(map(str, self.recipes)) or r"\d+"

    def list_runs(self) -> dict[Path, Recipe]:
        """Return the recipe of each seed by the folder of its run."""
        return {Path(self.folder.replace(WILDCARD, str(seed))): recipe for seed, recipe in self.recipes.items()}

    def every(self, *paths: str) -> list[str]:
        """Return the paths for every seed; one without the wildcard stands for itself."""
        return list(dict.fromkeys(path.replace(WILDCARD, str(seed)) for path in paths
                                  for seed in self.recipes or ("",)))

    def share_cores(self, cores: int | None, processes: int | None, runs_here: bool) -> int | None:
        """Return the threads of a job: all cores for one run, a share of them where seeds run side by side.

        A cluster runs each job on a machine of its own.

        Args:
            processes: that a stage starts, each with a thread at least.
        """
        if not (self.recipes and runs_here and cores):
            return cores
        return min(cores, max(cores // len(self.recipes), processes or 1))


@dataclass(frozen=True)
class StartModels:
    """The models that adapters are merged into: manifests by stage, with the wildcard for the seed."""

    manifests: dict[str, str]

    def find(self, wildcards) -> str:
        """Return the manifest for a job: an input function of Snakemake."""
        return self.manifests[wildcards.stage].replace(WILDCARD, wildcards.get("seed", ""))


def parse_seeds(config: dict) -> list[int]:
    """Return the seeds of --config; none: one run, with the seeds of its recipe."""
    if KEY not in config:
        return []
    values = config[KEY] if isinstance(config[KEY], list) else []
    seeds = [int(str(value)) for value in values if re.fullmatch(r"\d{1,10}", str(value), re.ASCII)]
    if not 0 < len(values) == len(set(seeds)) <= MAX_SEEDS or not all(seed in SEED for seed in seeds):
        raise SettingsError(f"--config: seeds must be a list of 1 to {MAX_SEEDS:,} whole numbers {SEED}, none twice, "
                            f"as in 'seeds=[0, 1, 2]', not {str(config[KEY])!r}")
    if "seed" in config:
        raise SettingsError("--config: give seed=N for one run, or seeds=[...] for several, not both")
    return sorted(seeds)  # the order changes nothing


def recipe_of_seed(recipe: Recipe, seeded: Recipe, seed: int) -> Recipe:
    """Return the recipe of one seed: the questions and the names are those of the run.

    Args:
        recipe: of the run.
        seeded: the same with the seed in every section.
    """
    return replace(seeded, name=f"{recipe.name}-seed-{seed}", dump=recipe.dump, posts=recipe.posts)
