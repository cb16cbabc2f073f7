"""Train the SFT model with RLOO against the reward model, with a KL penalty to the SFT model.

    python -m stages.rloo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/rloo

REINFORCE leave-one-out (arXiv 2402.14740): several responses to each prompt; the advantage of a response is its reward
less the mean of the others'. There is no critic. Everything else is as in stages/ppo.py.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from functools import partial
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.ppo import PolicyGradientMethod, train_policy
from stages.recipe.sections.policy_gradient import Rloo
from stages.rl.advantages import rloo_advantages
from stages.rl.inputs import Inputs


def run(config: Rloo, out: Path, *, policy: Path, reward: Path | None = None, pairs: Path | None = None,
        prompts: Path | None = None, context: RunContext | None = None) -> dict[str, float | str]:
    """Train the policy and fill `out`; return the metrics of the manifest. See `train_policy`.

    reward: the merged reward model, or its adapter, which then shares the policy's base; None: the rewards name none.
    pairs: their rl split has the questions. prompts: a file or folder of your own, in place of pairs.
    """
    return train_policy(config, out, make_method(config), Inputs(policy, reward, pairs, prompts), context)


def make_method(config: Rloo) -> PolicyGradientMethod:
    """Return RLOO with the settings of its section: the KL penalty is part of the reward."""
    return PolicyGradientMethod(
        "rloo",
        partial(rloo_advantages, responses_per_prompt=config.responses_per_prompt,
                normalize=config.normalize_advantages),
        kl_estimator=config.kl_estimator)
