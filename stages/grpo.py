"""Train the SFT model with GRPO against the reward model, with the KL to the SFT model in the loss.

    python -m stages.grpo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/grpo

Group relative policy optimisation (arXiv 2402.03300): several responses to each prompt; the advantage of a response is
its reward, normalised among them. There is no critic. Everything else is as in stages/ppo.py.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from functools import partial
from pathlib import Path

from stages.artifacts.artifact import RunContext
from stages.ppo import PolicyGradientMethod, train_policy
from stages.recipe.sections.policy_gradient import Grpo
from stages.rl.advantages import grpo_advantages
from stages.rl.inputs import Inputs


def run(config: Grpo, out: Path, *, policy: Path, reward: Path | None = None, pairs: Path | None = None,
        prompts: Path | None = None, context: RunContext | None = None) -> dict[str, float | str]:
    """Train the policy and fill `out`; return the metrics of the manifest. See `train_policy`.

    reward: the merged reward model, or its adapter, which then shares the policy's base; None: the rewards name none.
    pairs: their rl split has the questions. prompts: a file or folder of your own, in place of pairs.
    """
    return train_policy(config, out, make_method(config), Inputs(policy, reward, pairs, prompts), context)


def make_method(config: Grpo) -> PolicyGradientMethod:
    """Return GRPO with the settings of its section: the KL penalty is part of the loss."""
    return PolicyGradientMethod(
        "grpo",
        partial(grpo_advantages, responses_per_prompt=config.responses_per_prompt,
                scale_rewards=config.scale_rewards),
        kl_in="loss")
