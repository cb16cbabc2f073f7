"""Best-of-n: of n answers to a prompt the one of the highest reward. The yardstick for what a policy gains at its KL.

Shapes: N prompts, S samples of each.
"""

from math import comb, log

import numpy as np


def best_of_kl(n: int) -> float:
    """KL of best-of-n to what it samples from, in nats a response: log n - (n-1)/n.

    Exact where no two answers have the same reward, else the most it can be (Stiennon et al. 2020, appendix G.3;
    Beirami et al. 2024, arXiv 2401.01879).
    """
    return log(n) - (n - 1) / n


def chances(rewards: np.ndarray, n: int) -> np.ndarray:
    """How likely each sample [N, S] is the best of n that are drawn from its prompt's S without replacement.

    The sample of rank i (from 1, the lowest) wins C(i-1, n-1) of the C(S, n) draws: a mean weighted by this is an
    unbiased estimate for best-of-n with the least variance (a U-statistic; Nakano et al. 2021, arXiv 2112.09332,
    appendix I). Ties go to the later sample, which is chance: a prompt's samples are exchangeable.
    """
    count = rewards.shape[1]
    by_rank = np.array([comb(rank, n - 1) / comb(count, n) for rank in range(count)])
    found = np.empty(rewards.shape)
    np.put_along_axis(found, rewards.argsort(1, kind="stable"), np.broadcast_to(by_rank, rewards.shape), axis=1)
    return found
