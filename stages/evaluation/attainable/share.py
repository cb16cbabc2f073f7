"""Measure how much of the attainable objective each policy reached.

The objective is that of its own training. What is attainable is estimated from the samples of SFT, or of the base, that
best-of-n is measured with. Shapes: N prompts, S samples of each.
"""

from functools import partial

import numpy as np

from stages.evaluation.attainable.objective import Objective
from stages.evaluation.policy_comparison import PolicyComparison
from stages.evaluation.statistics import bootstrap_mean, bootstrap_statistic
from stages.evaluation.summary import SAMPLES
from stages.generation.optimal_tilt import attainable_objective, measure_optimum, tilt_curve


def measure_attainable(comparison: PolicyComparison, objectives: dict[str, Objective | None], *, samples: int, seed: int
                       ) -> dict | None:
    """Measure the optimum of each policy's objective, and the policy's share of it; None without repeated samples.

    samples, seed: of the bootstrap over questions.

    Returns: `samples`, a prompt. `curve`: gain and KL of the tilt by the unshaped reward, for falling beta
        (optimal_tilt.tilt_curve). `policies`: of each policy with a known objective, `optimum`
        (optimal_tilt.measure_optimum), its own `objective`, that of the `start`, and its `share` of the gain, a paired
        ratio; None where no sample differs in reward from another.
    """
    if SAMPLES not in comparison.answers:
        return None
    prompts, bootstrap = len(comparison.prompts.rows), {"samples": samples, "seed": seed}
    rewards, ended = comparison.rewards[SAMPLES], comparison.answers[SAMPLES].ended
    scores = comparison.score_questions([])
    policies = {}
    for name, objective in objectives.items():
        if objective:
            own = objective.shape(scores[name]["reward"], comparison.answers[name].ended)
            policies[name] = compare_with_optimum(
                objective.shape(rewards, ended).reshape(prompts, -1), own - objective.beta * scores[name]["kl_k1"],
                objective.beta, **bootstrap)
    return {"samples": len(rewards) // prompts, "curve": tilt_curve(rewards.reshape(prompts, -1)), "policies": policies}


def compare_with_optimum(rewards: np.ndarray, own: np.ndarray, beta: float, *, samples: int, seed: int) -> dict:
    """Compare a policy's objective [N] with the optimum, from rewards [N, S] of its start; see measure_attainable."""
    start, prompts = rewards.mean(1), np.arange(len(rewards))
    gain = np.where(rewards.max(1) > rewards.min(1), attainable_objective(rewards, beta) - start, 0.0)
    estimate_mean = partial(bootstrap_mean, samples=samples, seed=seed)
    return {"optimum": measure_optimum(rewards, beta, estimate_mean),
            "objective": estimate_mean(own, prompts), "start": estimate_mean(start, prompts),
            "share": bootstrap_statistic(lambda sums: sums[0] / sums[1], np.stack([own - start, gain]), prompts,
                                         samples=samples, seed=seed)}
