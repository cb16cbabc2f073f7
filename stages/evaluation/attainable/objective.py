"""Read from a finished training which objective it maximised: the shaped reward minus beta times the KL."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from stages.artifacts.artifact import digest, read_manifest
from stages.artifacts.finished import has_manifest
from stages.artifacts.lineage import find_input
from stages.rewards.reward_functions import MODEL
from stages.rewards.shaping import ShapingSettings, shape_rewards
from stages.runtime.series import read_history

SCALE = "validation_reward_scale"
SHAPING = ShapingSettings.__dataclass_fields__.keys() - {"prompt_template"}  # which no reward depends on here
NEEDED = SHAPING | {"rewards", "kl_coefficient", "temperature"}  # settings of a training on a reward with a KL


@dataclass(frozen=True)
class Objective:
    """An objective E[r] - beta KL.

    beta: above 0. weight: of the evaluation's reward in the sum. shaping: None leaves the reward as it is. scale:
    divisor of the reward.
    """

    beta: float
    weight: float = 1.0
    shaping: ShapingSettings | None = None
    scale: float = 1.0

    def shape(self, rewards: np.ndarray, ended: list[bool]) -> np.ndarray:
        """Compute the rewards [N] of training from those of the evaluation; ended: which answers had an EOS.

        Without the mean of `reward_scaling: start`: it shifts every policy's reward alike.
        """
        if self.shaping is None:
            return rewards
        return shape_rewards(torch.from_numpy(self.weight * rewards), ended, self.shaping, 0.0, self.scale).numpy()


def read_objective(merged: Path, reward: Path | None, temperature: float) -> Objective | None:
    """Read the objective of the policy that was merged; None where the evaluation cannot compute it.

    DPO's is that of its derivation: the reward model's score, unscaled, with its own beta.

    Args:
        reward: the reward model of the evaluation; None: the evaluation's reward is the sum that training computed.
        temperature: of the evaluation, at which training must have measured its KL.
    """
    training = _find_training(merged)
    if training is None:
        return None
    manifest = read_manifest(training)
    config = manifest["config"]
    if manifest["stage"] == "dpo":
        return Objective(config["beta"]) if config["loss"] == "sigmoid" and temperature == 1 else None
    if not config.keys() >= NEEDED or config["temperature"] != temperature or not _has_same_reward(manifest, reward):
        return None
    published = _read_published(training, manifest["metrics"].get("best_iteration"))
    beta = published.get("beta", config["kl_coefficient"])
    if SCALE not in published or not beta > 0:
        return None
    shaping = ShapingSettings(**{name: config[name] for name in SHAPING}, prompt_template="question")
    weight = config["rewards"][0]["weight"] if reward else 1.0
    return Objective(beta, weight, shaping, published[SCALE])


def _find_training(merged: Path) -> Path | None:
    """Locate the artifact of the policy that was merged; None if it is gone or has changed since."""
    manifest = read_manifest(merged) if has_manifest(merged) else {}
    if manifest.get("stage") != "merge":
        return None
    source = manifest["inputs"]["adapter"][-1]
    training = find_input(merged, source["path"])
    return training if has_manifest(training) and digest(training) == source["sha256"] else None


def _has_same_reward(manifest: dict, reward: Path | None) -> bool:
    """Check whether the rewards of a training follow from those of the evaluation.

    Not without the length's part of the score, nor with a mean of the start that a clip or a replaced reward depends
    on.
    """
    config = manifest["config"]
    if not config.get("score_length", True):
        return False
    if config["reward_scaling"] == "start" and (config["reward_clip"] or config["missing_eos"] == "replace"):
        return False
    return reward is None or ([entry["source"] for entry in config["rewards"]] == [MODEL]
                              and config["reward_combine"] == "mean"
                              and manifest["inputs"]["reward"]["sha256"] == digest(reward))


def _read_published(training: Path, iteration: int | None) -> dict:
    """Return what was logged at the iteration that was published, or last where training does not name it."""
    history = [row for row in read_history(training) if iteration in (None, row.get("iteration"))]
    return {name: value for row in history for name, value in row.items()}
