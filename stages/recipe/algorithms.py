"""List the algorithms that align a policy, and the facts about each: for the workflow, the pages and the cards.

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

    title: its name for people.
    method: how it changes the fine-tuned model, the end of a sentence in model cards.
    inputs: of its program, flags of the same name: policy (the merged SFT model), reward (the merged reward model),
        pairs.
    split: of the pairs, which it trains on or samples from.
    is_policy_gradient: needs prompts and a reward only, and so is among the algorithms of a run on own prompts.
    has_critic: learns a value function beside the policy.
    compared_curves: names of the curves (reporting/curves.py) that a comparison of runs shows.
    trains_model: False if its artifact has no model that could be merged, and evaluated by its name.
    """

    name: str
    title: str
    method: str = ""
    inputs: tuple[str, ...] = ("policy", "reward", "pairs")
    split: str = "rl"
    is_policy_gradient: bool = False
    has_critic: bool = False
    compared_curves: tuple[str, ...] = ()
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


TOWARDS_REWARD = "towards what a reward model scores high, kept near the fine-tuned model by a KL penalty"
SAMPLED_CURVES = ("reward", "kl", "length", "entropy", "eos")
ALGORITHMS = {algorithm.name: algorithm for algorithm in (
    Algorithm(FIRST, "PPO", f"by PPO {TOWARDS_REWARD}", is_policy_gradient=True, has_critic=True,
              compared_curves=(*SAMPLED_CURVES, "explained")),
    Algorithm("dpo", "DPO", "by direct preference optimisation on pairs of answers: the preferred one became more "
              "probable than the other, relative to the fine-tuned model", ("policy", "pairs"), split="reward",
              compared_curves=("loss", "accuracy", "margin", "logprob", "drift")),
    Algorithm("rloo", "RLOO", f"by REINFORCE leave-one-out {TOWARDS_REWARD}", is_policy_gradient=True,
              compared_curves=SAMPLED_CURVES),
    Algorithm("grpo", "GRPO", f"by group relative policy optimisation {TOWARDS_REWARD}", is_policy_gradient=True,
              compared_curves=SAMPLED_CURVES),
    Algorithm("best_of_n", "best of n", trains_model=False),
    Algorithm("expert_iteration", "expert iteration", "in rounds, on those of its own answers that a reward model "
              "scored highest"),
    Algorithm("ilql", "ILQL", "by ILQL on scored answers, without sampling any. Q heads beside the model "
              "(`q_heads.safetensors`) shift its logits; Transformers alone loads the model without them",
              ("policy", "pairs"), split="reward"))}
TRAINED = tuple(name for name, algorithm in ALGORITHMS.items() if algorithm.trains_model)


def list_targets() -> list[str]:
    """List the names that runs on a dump have for their stages and targets."""
    stages = ("posts", "pairs", "sft", "reward", "judge", EVALUATE, REPORT, SEEDS)
    merged = (f"{name}_merged" for name in ("sft", "reward", "judge", *ALGORITHMS))
    named = (algorithm.rule_name(stage) for algorithm in ALGORITHMS.values() for stage in (EVALUATE, REPORT, SEEDS))
    return [*dict.fromkeys((*stages, *merged, *ALGORITHMS, *named, "frontier", "gguf"))]
