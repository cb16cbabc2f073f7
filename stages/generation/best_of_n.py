"""Yardsticks, from repeated samples, for the reward that a policy gains at a given KL: best-of-n and the optimal tilt.

Best-of-n draws n responses and takes the one with the highest reward. The optimum of E[r] - beta KL, with the KL to the
policy that was sampled, weights each response by exp(r / beta), and reaches beta log E[exp(r / beta)] (Rafailov et al.
2023, arXiv 2305.18290, appendix A.1).

Shapes: N prompts, S samples of each, as rewards [N, S] in float64.
"""

from collections.abc import Callable
from math import comb, log

import numpy as np

SETTLED_SHARE = 0.02  # of the attainable gain, that the last doubling of samples may add
BETAS = tuple(float(f"{digit}e{power}") for power in range(-3, 3) for digit in (1, 1.5, 2, 3, 5, 7))  # of the curve


def best_of_kl(n: int) -> float:
    """Bound the KL of best-of-n to the sampled policy, in nats per response: log n - (n-1)/n.

    Exact if no two responses have the same reward, else an upper bound (Stiennon et al. 2020, appendix G.3; Beirami et
    al. 2024, arXiv 2401.01879).
    """
    return log(n) - (n - 1) / n


def best_of_n_weights(rewards: np.ndarray, n: int) -> np.ndarray:
    """Compute the probability that each sample [N, S] is the best of n drawn from its prompt's S without replacement.

    The sample of rank i (from 1, the lowest reward) wins C(i-1, n-1) of the C(S, n) draws. The mean with these weights
    is the unbiased estimate for best-of-n with the least variance (a U-statistic; Nakano et al. 2021, arXiv 2112.09332,
    appendix I). Ties go to the later sample, which is random: a prompt's samples are exchangeable.
    """
    samples = rewards.shape[1]
    by_rank = np.array([comb(rank, n - 1) / comb(samples, n) for rank in range(samples)])
    weights = np.empty(rewards.shape)
    np.put_along_axis(weights, rewards.argsort(1, kind="stable"), np.broadcast_to(by_rank, rewards.shape), axis=1)
    return weights


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


def extrapolated_objective(rewards: np.ndarray, beta: float) -> np.ndarray:
    """Extrapolate `attainable_objective` [N] to many samples, from all and from each half of them: its bias of order
    1/S is gone (Quenouille 1956, doi 10.1093/biomet/43.3-4.353). One sample gives nothing to extrapolate from.
    """
    samples = rewards.shape[1]
    half, whole = samples // 2, attainable_objective(rewards, beta)
    if not half:
        return whole
    return whole + (whole - _objective_of_groups(rewards, beta, half).mean(1)) * half / (samples - half)


def tilt_kl(weights: np.ndarray) -> np.ndarray:
    """Compute the KL [N] from weights [N, S] to equal weights, in nats a response: at most log S."""
    return (weights * np.log(np.maximum(weights * weights.shape[1], np.finfo(float).tiny))).sum(1)


def measure_optimum(rewards: np.ndarray, beta: float, estimate_mean: Callable) -> dict:
    """Measure the optimum at one beta: objective, also extrapolated, reward and KL of the tilt, and the objective with
    fewer samples.

    Args:
        estimate_mean: (values [N], groups [N]) to a mean with its interval (statistics.bootstrap_mean).

    Returns: `by_samples`: the mean objective by number of samples. `settled`: whether the last doubling added at most
        SETTLED_SHARE of the gain over equal weights; what is still missing is about as much again or more.
    """
    weights, prompts = tilt_weights(rewards, beta), np.arange(len(rewards))
    values = {"objective": attainable_objective(rewards, beta), "extrapolated": extrapolated_objective(rewards, beta),
              "reward": (weights * rewards).sum(1), "kl": tilt_kl(weights)}
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
    """Estimate the mean objective with a quarter, half and all of the samples."""
    samples = rewards.shape[1]
    return {str(count): float(_objective_of_groups(rewards, beta, count).mean())
            for count in sorted({samples // 4, samples // 2, samples} - {0})}


def _objective_of_groups(rewards: np.ndarray, beta: float, count: int) -> np.ndarray:
    """Estimate the highest objective from each of the disjoint groups of `count` samples, [N, S // count]."""
    prompts, groups = len(rewards), rewards.shape[1] // count
    return attainable_objective(rewards[:, :groups * count].reshape(-1, count), beta).reshape(prompts, groups)
