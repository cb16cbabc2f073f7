"""The optimum of E[r] - beta KL, estimated from samples of the policy that the KL is measured to.

The policy that maximises it weights each response by exp(r / beta), and reaches beta log E[exp(r / beta)] (Rafailov et
al. 2023, arXiv 2305.18290, appendix A.1). Shapes: N prompts, S samples of each, as rewards [N, S] in float64.
"""

from collections.abc import Callable

import numpy as np

SETTLED_SHARE = 0.02  # of the attainable gain, that the last doubling of samples may add
BETAS = tuple(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 1.5, 2, 3, 5, 7))  # of the curve


def tilt_weights(rewards: np.ndarray, beta: float) -> np.ndarray:
    """Compute the share [N, S] of each sample in the estimated optimal policy; beta above 0."""
    weights = np.exp((rewards - rewards.max(1, keepdims=True)) / beta)
    return weights / weights.sum(1, keepdims=True)


def attainable_objective(rewards: np.ndarray, beta: float) -> np.ndarray:
    """Estimate the highest objective [N], beta log E[exp(r / beta)], by the mean over samples.

    Its expectation is a lower bound that rises with S (Jensen's inequality).
    """
    highest = rewards.max(1, keepdims=True)
    return highest[:, 0] + beta * np.log(np.exp((rewards - highest) / beta).mean(1))


def tilt_kl(weights: np.ndarray) -> np.ndarray:
    """Compute the KL [N] from weights [N, S] to equal weights, in nats a response: at most log S."""
    return (weights * np.log(np.maximum(weights * weights.shape[1], np.finfo(float).tiny))).sum(1)


def measure_optimum(rewards: np.ndarray, beta: float, estimate_mean: Callable) -> dict:
    """Measure the optimum at one beta: objective, reward and KL of the tilt, and the objective with fewer samples.

    Args:
        estimate_mean: (values [N], groups [N]) to a mean with its interval (statistics.bootstrap_mean).

    Returns: `by_samples`: the mean objective by number of samples. `settled`: whether the last doubling added at most
        SETTLED_SHARE of the gain over equal weights; what is still missing is about as much again or more.
    """
    weights, prompts = tilt_weights(rewards, beta), np.arange(len(rewards))
    values = {"objective": attainable_objective(rewards, beta), "reward": (weights * rewards).sum(1),
              "kl": tilt_kl(weights)}
    by_samples = _objective_by_samples(rewards, beta)
    half, whole = list(by_samples.values())[-2:] if len(by_samples) > 1 else (-np.inf, values["objective"].mean())
    return {"beta": beta, **{name: estimate_mean(column, prompts) for name, column in values.items()},
            "by_samples": by_samples,
            "settled": bool(whole - half <= SETTLED_SHARE * (whole - rewards.mean()))}


def tilt_curve(rewards: np.ndarray) -> list[dict[str, float]]:
    """Compute, for falling beta, the KL and the gain in mean reward of the tilt: no policy has more at this KL."""
    curve = []
    for beta in reversed(BETAS):
        weights = tilt_weights(rewards, beta)
        curve.append({"beta": beta, "kl": float(tilt_kl(weights).mean()),
                      "gain": float(((weights * rewards).sum(1) - rewards.mean(1)).mean())})
    return curve


def _objective_by_samples(rewards: np.ndarray, beta: float) -> dict[str, float]:
    """Estimate the mean objective with a quarter, half and all of the samples, over disjoint groups of them."""
    samples, objectives = rewards.shape[1], {}
    for count in sorted({samples // 4, samples // 2, samples} - {0}):
        groups = rewards[:, :samples // count * count].reshape(-1, count)
        objectives[str(count)] = float(attainable_objective(groups, beta).mean())
    return objectives
