"""Variants of a run's trainings: the same section of the recipe, with other values of a few settings.

The frontier trains some algorithms several times, and PPO may have a control. A variant's artifact is in the folder
`frontier/NAME` of the run, and its manifest records the settings that it was made with.
"""

from dataclasses import dataclass, field
from typing import Any

import yaml

from stages.recipe.schema import compared_settings, override, to_dict
from stages.recipe.sections.evaluate import Frontier
from stages.recipe.sections.ppo import Ppo

FOLDER = "frontier"  # of a run
EVALUATE = "evaluate"  # the evaluation of all variants, in that folder


@dataclass(frozen=True)
class Variant:
    """A training with some settings of its own.

    name: of the policy, and of its folder. section: of the recipe, and of the program. mark: what differs, for people;
    empty where nothing does. overrides: settings that differ from the section's. match: the training that it ends at
    the KL of, an input of the program; empty: none.
    """

    name: str
    section: str
    mark: str = ""
    overrides: dict[str, Any] = field(default_factory=dict)
    match: str = ""

    @property
    def key(self) -> str:
        """Return the name of an input of a rule."""
        return self.name.replace("-", "_")

    @property
    def policy_flag(self) -> str:
        """Return the flag that names its policy to evaluate, for the shell of a rule with the input `key`."""
        return f"--policy {self.name}={{input.{self.key}:q}}"

    def further_inputs(self, run: str) -> dict[str, str]:
        """Return the inputs beside those of its section's training, by name; run: the folder."""
        return {"match": f"{run}/{self.match}/manifest.json"} if self.match else {}

    def folder(self, recipe: Any) -> str:
        """Return the folder of the training in a run: that of the run itself where no setting differs."""
        differs = override(getattr(recipe, self.section), self.overrides, self.name) != getattr(recipe, self.section)
        return f"{FOLDER}/{self.name}" if differs else self.section


# PPO that is paid for the length of its answers alone (Singhal et al. 2023, arXiv 2310.03716), in standard deviations
# of SFT's, so that a KL coefficient weighs the same. It is evaluated after each iteration, to end near PPO's KL.
LENGTH_CONTROL = Variant("ppo-length", "ppo", "length alone", {
    "rewards": [{"source": "response_tokens"}], "reward_scaling": "start", "reward_baseline": 0.0,
    "evaluate_every_iterations": 1, "patience_evaluations": None}, match="ppo")


def list_own_trainings(recipe: Any, variants: list[Variant]) -> list[Variant]:
    """List those of the variants that the run does not train anyway."""
    return [variant for variant in variants if variant.folder(recipe) != variant.section]


def list_variants(frontier: Frontier) -> list[Variant]:
    """List the trainings of the frontier; a KL coefficient of PPO is fixed, so that each gives another point."""
    swept = {
        "ppo": [Variant(_name("ppo-kl", beta), "ppo", f"\u03b2\u00a0{beta:g}",
                        {"kl_coefficient": beta, "kl_target_nats": None}) for beta in frontier.ppo_kl_coefficients],
        "dpo": [Variant(_name("dpo-beta", beta), "dpo", f"\u03b2\u00a0{beta:g}", {"beta": beta})
                for beta in frontier.dpo_betas]}
    return [variant for algorithm in frontier.algorithms
            for variant in swept.get(algorithm, [Variant(algorithm, algorithm)])]


def evaluation_overrides(frontier: Frontier) -> dict[str, Any]:
    """Return the settings of the section evaluate for the frontier: one temperature for all, and many best-of-n."""
    return {"prompts": frontier.prompts, "best_of": frontier.best_of, "temperature_prompts": 0,
            "max_pairs": frontier.max_pairs}


def variant_settings(recipe: Any, section: str, overrides: dict[str, Any]) -> dict:
    """Return a section's settings with the overrides, for the `params` of a Snakemake rule."""
    return compared_settings(override(getattr(recipe, section), overrides, f"frontier, {section}"))


def format_options(overrides: dict[str, Any]) -> list[str]:
    """Return the overrides as words of a program's command line: --kl-target-nats null."""
    return [word for name, value in overrides.items()
            for word in (f"--{name.replace('_', '-')}", _format_value(value))]


def format_inputs(wildcards: Any, input: Any) -> list[str]:
    """Return a job's inputs as flags of the same names: a function that Snakemake calls for `params`."""
    return [word for name, path in input.items() for word in (f"--{name}", str(path))]


def overrides_of_folder(name: str, frontier: dict) -> dict[str, Any]:
    """Return the settings that differ in the folder `frontier/NAME` of a run, as plain values.

    frontier: the run's section, as plain values, or empty.
    """
    settings = override(Frontier(), frontier, "frontier")
    overrides = {variant.name: variant.overrides for variant in list_variants(settings)}
    control = to_dict(override(Ppo(), LENGTH_CONTROL.overrides, LENGTH_CONTROL.name))
    overrides |= {EVALUATE: evaluation_overrides(settings),
                  LENGTH_CONTROL.name: {key: control[key] for key in LENGTH_CONTROL.overrides}}
    return {key: list(value) if isinstance(value, tuple) else value for key, value in overrides.get(name, {}).items()}


def _name(stem: str, value: float) -> str:
    """Name a folder by a number; without a dot, which names of stages do not have: ppo-kl-0_03."""
    return f"{stem}-{value:g}".replace(".", "_").replace("+", "")


def _format_value(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):  # of sections; without braces, which Snakemake would read
        return yaml.safe_dump(value).strip()
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
