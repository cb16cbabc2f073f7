"""List the algorithms that align a policy, and what the workflow has to know of each.

An algorithm is a program `stages/NAME.py`, a section of the recipe and a target of Snakemake, all of the same name. In
a run's folder it has NAME, NAME-merged, evaluate-NAME and report-NAME; PPO has evaluate and report.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FIRST = "ppo"  # the algorithm whose evaluation and report bear no name
REPORT, EVALUATE, SEEDS = "report", "evaluate", "seeds"


@dataclass(frozen=True)
class Algorithm:
    """A way to align the SFT model.

    inputs: of its program, flags of the same name: policy (the merged SFT model), reward (the merged reward model),
        pairs.
    trains_model: False if its artifact has no model that could be merged, and evaluated by its name.
    """

    name: str
    inputs: tuple[str, ...] = ("policy", "reward", "pairs")
    trains_model: bool = True

    def format_policy(self, wildcards: Any, input: Any) -> list[str]:
        """Return the flags that name its policy, and its control if it has one, to evaluate and report.

        A function that Snakemake calls. input: `policy`, and `control`, whose folder is named after its policy.
        """
        controls = {Path(path).parent.name.removesuffix("-merged"): path for path in getattr(input, "control", ())}
        policies = ({self.name: input.policy} if self.trains_model else {}) | controls
        return [word for name, path in policies.items() for word in ("--policy", f"{name}={path}")]

    def policy_inputs(self, manifest: str) -> list[str]:
        """Return the input `policy` of a rule with `format_policy`: the manifest, or nothing without a policy."""
        return [manifest] if self.trains_model else []

    def rule_name(self, stage: str) -> str:
        """Return the name of its rule for a stage: evaluate, report or seeds."""
        return stage if self.name == FIRST else f"{stage}_{self.name}"

    def folder(self, stage: str) -> str:
        """Return the name of its folder for a stage: evaluate, report or seeds."""
        return stage if self.name == FIRST else f"{stage}-{self.name}"

    @property
    def result(self) -> str:
        """Return the name of the folder of what it makes: the merged model, or else its own artifact."""
        return f"{self.name}-merged" if self.trains_model else self.name


ALGORITHMS = {algorithm.name: algorithm for algorithm in (
    Algorithm(FIRST), Algorithm("dpo", ("policy", "pairs")), Algorithm("rloo"), Algorithm("grpo"),
    Algorithm("best_of_n", trains_model=False), Algorithm("expert_iteration"), Algorithm("ilql", ("policy", "pairs")))}
SIBLINGS = {name: algorithm for name, algorithm in ALGORITHMS.items() if name != FIRST}


def list_targets() -> list[str]:
    """List the names that runs on a dump have for their stages and targets."""
    stages = ("posts", "pairs", "sft", "reward", "judge", EVALUATE, REPORT, SEEDS)
    merged = (f"{name}_merged" for name in ("sft", "reward", "judge", *ALGORITHMS))
    named = (algorithm.rule_name(stage) for algorithm in ALGORITHMS.values() for stage in (EVALUATE, REPORT, SEEDS))
    return [*dict.fromkeys((*stages, *merged, *ALGORITHMS, *named, "frontier", "gguf"))]
