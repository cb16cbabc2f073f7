"""Best-of-n sampling: draw n responses and take the one with the highest reward. Shapes: N prompts, S samples of each.

It is the yardstick for the reward that a policy gains at a given KL.
"""

from math import comb, log

import numpy as np


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
