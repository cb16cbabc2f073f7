"""Train the SFT model with PPO against the reward model, with a KL penalty to the SFT model.

    python -m stages.ppo --recipe configs/demo.yaml --policy results/demo/sft-merged \\
        --reward results/demo/reward-merged --pairs results/demo/pairs --out results/demo/ppo

The algorithm is in rl/policy_gradient_trainer.py, its outer loop in rl/training_loop.py. The artifact is the policy
with the best score on held-out prompts. A resumed run equals the uninterrupted one bit for bit.
"""

from stages.command_line.start import main

if __name__ == "__main__":  # before the imports below: parsing must not wait for torch
    main(__file__)

from dataclasses import replace
from functools import partial
from pathlib import Path

from stages.artifacts.artifact import RunContext, read_manifest
from stages.recipe.sections.ppo import Ppo
from stages.rl.advantages import gae_advantages
from stages.rl.train import Algorithm, Sources, train_policy

MIN_KL_NATS = 0.1  # of a policy that moved at all


def run(config: Ppo, out: Path, *, policy: Path, reward: Path | None = None, pairs: Path | None = None,
        prompts: Path | None = None, match: Path | None = None, context: RunContext | None = None
        ) -> dict[str, float | str]:
    """Train the policy and its critic and fill `out`; return the metrics of the manifest. See `train_policy`.

    reward: the merged reward model, or its adapter, which then shares the policy's base; None: the rewards name none.
    pairs: their rl split has the questions. prompts: a file or folder of your own, in place of pairs. match: a finished
    training; its policy's KL on held-out prompts takes the place of max_kl_nats.
    """
    config = config if match is None else replace(config, max_kl_nats=read_kl_limit(match))
    return train_policy(config, out, make_algorithm(config), Sources(policy, reward, pairs, prompts), context)


def read_kl_limit(trained: Path) -> float:
    """Return the KL of a trained policy on held-out prompts, nats per response, and at least MIN_KL_NATS."""
    kl_nats = read_manifest(trained)["metrics"].get("validation_kl")
    if kl_nats is None:
        raise ValueError(f"--match {trained} has no validation_kl in its manifest: give a finished training of PPO")
    return max(kl_nats, MIN_KL_NATS)


def make_algorithm(config: Ppo) -> Algorithm:
    """Return PPO with the settings of its section: GAE from a critic, the KL penalty in the reward."""
    return Algorithm(
        "ppo",
        partial(gae_advantages, gamma=config.gamma, gae_lambda=config.gae_lambda, variance=config.advantage_variance,
                whiten_rewards=config.whiten_rewards),
        value_model=config.value_model, critic_learning_rate=config.critic_learning_rate,
        kl_estimator=config.kl_estimator)
