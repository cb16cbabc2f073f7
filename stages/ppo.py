"""Train the SFT model with PPO against the reward model, with a KL penalty to the SFT model.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

The algorithm is in rl/policy_gradient_trainer.py, its outer loop in rl/training_loop.py. The artifact is the policy
with the best score on held-out prompts. A resumed run equals the uninterrupted one bit for bit.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from functools import partial
from pathlib import Path

from stages.recipe.sections.ppo import Ppo
from stages.rl.advantages import gae_advantages
from stages.rl.train import Algorithm, Sources, train_policy
from stages.runtime.artifact import RunContext


def run(config: Ppo, out: Path, *, policy: Path, reward: Path | None = None, pairs: Path | None = None,
        prompts: Path | None = None, context: RunContext | None = None) -> dict[str, float | str]:
    """Train the policy and its critic and fill `out`; return the metrics of the manifest. See `train_policy`.

    reward: the merged reward model, or its adapter, which then shares the policy's base; None: the rewards name none.
    pairs: their rl split has the questions. prompts: a file or folder of your own, in place of pairs.
    """
    return train_policy(config, out, make_algorithm(config), Sources(policy, reward, pairs, prompts), context)


def make_algorithm(config: Ppo) -> Algorithm:
    """Return PPO with the settings of its section: GAE from a critic, the KL penalty in the reward."""
    return Algorithm(
        "ppo",
        partial(gae_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda, variance=config.advantage_variance,
                whiten_rewards=config.whiten_rewards),
        value_model=config.value_model, critic_learning_rate=config.critic_learning_rate,
        kl_estimator=config.kl_estimator)
