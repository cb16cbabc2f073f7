"""Read from a finished training which objective it maximised, and measure how much of what is attainable each policy
reached. The objective is the shaped reward minus beta times the KL.

What is attainable is estimated from the samples of SFT, or of the base, that best-of-n is measured with. Shapes: N
prompts, S samples of each.

"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.artifacts.artifact import digest, has_manifest, read_manifest
from stages.artifacts.lineage import find_input
from stages.evaluation.policy_comparison import PolicyComparison
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.evaluation.summary import SAMPLES
from stages.generation.best_of_n import attainable_objective, extrapolated_objective, measure_optimum, tilt_curve
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
    beta = config["kl_coefficient"]  # an annealed penalty is at that; an adaptive one is what it was when published
    if config.get("kl_target_nats") is not None:
        beta = published.get("beta", beta)
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

    Not with a mean of the start that a clip or a replaced reward depends on.
    """
    config = manifest["config"]
    if config["reward_scaling"] == "start" and (config["reward_clip"] or config["missing_eos"] == "replace"):
        return False
    return reward is None or ([entry["source"] for entry in config["rewards"]] == [MODEL]
                              and config["reward_combine"] == "mean"
                              and manifest["inputs"]["reward"]["sha256"] == digest(reward))


def _read_published(training: Path, iteration: int | None) -> dict:
    """Return what was logged at the iteration that was published, or last where training does not name it."""
    history = [row for row in read_history(training) if iteration in (None, row.get("iteration"))]
    return {name: value for row in history for name, value in row.items()}


def measure_attainable(comparison: PolicyComparison, objectives: dict[str, Objective | None], *, samples: int, seed: int
                       ) -> dict | None:
    """Measure the optimum of each policy's objective, and the policy's share of it; None without repeated samples.

    samples, seed: of the bootstrap over questions.

    Returns: `samples`, a prompt. `curve`: gain and KL of the tilt by the unshaped reward, for falling beta
        (best_of_n.tilt_curve). `policies`: of each policy with a known objective, `optimum`
        (best_of_n.measure_optimum), its own `objective`, that of the `start`, and its `share` of the gain, a paired
        ratio, and `share_extrapolated`, of the extrapolated optimum; None where no sample differs in reward from
        another.
    """
    if SAMPLES not in comparison.answers:
        return None
    prompts, bootstrap = len(comparison.prompts.rows), {"samples": samples, "seed": seed}
    rewards, ended = comparison.rewards[SAMPLES], comparison.answers[SAMPLES].ended
    scores = comparison.score_questions([])
    policies = {}
    for name, objective in objectives.items():
        if objective:
            own, one = (objective.shape(scores[writer]["reward"], comparison.answers[writer].ended)
                        for writer in (name, comparison.start))
            policies[name] = compare_with_optimum(
                objective.shape(rewards, ended).reshape(prompts, -1), own - objective.beta * scores[name]["kl_k1"],
                one, objective.beta, **bootstrap)
    return {"samples": len(rewards) // prompts, "curve": tilt_curve(rewards.reshape(prompts, -1)), "policies": policies}


def compare_with_optimum(rewards: np.ndarray, own: np.ndarray, one: np.ndarray, beta: float, *, samples: int, seed: int
                         ) -> dict:
    """Compare a policy's objective [N] with the optimum, from rewards [N, S] of its start; see measure_attainable.

    one: rewards [N] of a further answer of the start, drawn with the policy's random numbers: a control variate of the
    share, which is then 0 for a policy that is the start.
    """
    start, prompts = rewards.mean(1), np.arange(len(rewards))
    gained, control = own - start, one - start
    slope = np.cov(gained, control, bias=True)[0, 1] / control.var() if control.var() else 0.0
    gains = {name: np.where(rewards.max(1) > rewards.min(1), estimate(rewards, beta) - start, 0.0)
             for name, estimate in (("share", attainable_objective), ("share_extrapolated", extrapolated_objective))}
    estimate_mean = partial(bootstrap_mean, samples=samples, seed=seed)
    return {"optimum": measure_optimum(rewards, beta, estimate_mean),
            "objective": estimate_mean(own, prompts), "start": estimate_mean(start, prompts),
            **{name: bootstrap_statistic(lambda sums: sums[0] / sums[1], np.stack([gained - slope * control, gain]),
                                         prompts, samples=samples, seed=seed) for name, gain in gains.items()}}
