"""Reward and KL of best-of-n for every n that the samples of a prompt allow. Shapes: P prompts, S samples of each."""

import numpy as np

from stages.evaluation.statistics import bootstrap_mean
from stages.generation.best_of_n import best_of_kl, best_of_n_weights


def measure_best_of_n(rewards: np.ndarray, bootstrap_samples: int, seed: int) -> list[dict]:
    """Compute, for n = 1, 2, 4, ... and S, the KL bound in nats and the unbiased mean reward with its 95 % interval.

    The interval is by prompt. rewards: [P, S].
    """
    prompts, samples = rewards.shape
    counts = [n for exponent in range(samples.bit_length()) if (n := 2**exponent) < samples] + [samples]
    expected = {n: (best_of_n_weights(rewards, n) * rewards).sum(1) for n in counts}
    return [{"n": n, "kl": best_of_kl(n), "reward": bootstrap_mean(
        values, np.arange(prompts), samples=bootstrap_samples, seed=seed)} for n, values in expected.items()]
