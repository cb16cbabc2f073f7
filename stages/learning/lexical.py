"""A term of the reward that looks words up: counts of an answer's tokens and pairs of neighbours, and its length.

A small trunk learns little about which words people prefer from a few thousand pairs; a logistic regression over counts
learns that, with a strong penalty, and knows no more. It is learnt first, alone: a convex problem, one answer. The
head then learns what this term leaves, on scores that come from other questions (out of fold; Wolpert 1992, stacked
generalisation): on what it was itself fitted to, it would leave nothing to learn.
Shapes: B answers, K buckets, T entries (an answer's different words, over all answers).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import embedding_bag, softplus

FILE = "lexical.safetensors"
MIXING = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, of no pattern: products with them spread over all 64 bits
STEPS, LEAST_SLOPE, LEAST_CHANGE = 200, 1e-7, 1e-12


class Counts(NamedTuple):
    """Answers as bags: buckets [T] and log(1 + count) [T] of all, each answer's from offsets [B] on; log(1 + tokens)
    lengths [B]."""

    buckets: torch.Tensor
    values: torch.Tensor
    offsets: torch.Tensor
    lengths: torch.Tensor

    def scores(self, weights: torch.Tensor) -> torch.Tensor:
        """[B], given a weight for each bucket and, the last, one for the length [K + 1]."""
        words = embedding_bag(
            self.buckets, weights[:-1, None], self.offsets, mode="sum", per_sample_weights=self.values
        )
        return words[:, 0] + weights[-1] * self.lengths


@dataclass(frozen=True)
class Lexical:
    """weights [K + 1] float64 on the CPU: of each bucket and, the last, of the length."""

    weights: torch.Tensor

    def __call__(self, answers: Sequence[list[int]]) -> torch.Tensor:
        """Scores [B] fp32 on the CPU."""
        return counts(answers, len(self.weights) - 1).scores(self.weights).float()

    def save(self, folder: Path) -> None:
        save_file({"weights": self.weights}, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> "Lexical | None":
        """The one that a reward model in `folder` has, if any."""
        return cls(load_file(folder / FILE)["weights"]) if (folder / FILE).is_file() else None


def counts(answers: Sequence[list[int]], buckets: int) -> Counts:
    """Each token, and each pair of neighbours, falls into one of `buckets` by its hash; those of one bucket add up."""
    found = [np.unique(_hashed(np.asarray(answer, dtype=np.uint64), buckets), return_counts=True) for answer in answers]
    ends = np.cumsum([0, *(len(words) for words, _ in found)])
    return Counts(
        torch.from_numpy(np.concatenate([words for words, _ in found]).astype(np.int64)),
        torch.from_numpy(np.log1p(np.concatenate([times for _, times in found]))),
        torch.from_numpy(ends[:-1]),
        torch.from_numpy(np.log1p([float(len(answer)) for answer in answers])),
    )


def _hashed(tokens: np.ndarray, buckets: int) -> np.ndarray:
    single, pair = (np.uint64(number) for number in MIXING)
    mixed = np.concatenate([(tokens + np.uint64(1)) * single, ((tokens[:-1] * single) ^ tokens[1:]) * pair])
    return (mixed >> np.uint64(32)) % np.uint64(buckets)


def fitted(
    bags: Counts, better: Sequence[int], worse: Sequence[int], *, buckets: int, penalty: float, others: torch.Tensor
) -> Lexical:
    """The weights of least sum of -log sigmoid(s_better - s_worse), plus penalty |weights|^2 / 2, by L-BFGS.

    better, worse: of each pair, the numbers of its answers. others [B]: what else is in an answer's score.
    """
    weights = torch.zeros(buckets + 1, dtype=torch.float64, requires_grad=True)
    better, worse = torch.as_tensor(better), torch.as_tensor(worse)
    optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, tolerance_grad=LEAST_SLOPE, tolerance_change=LEAST_CHANGE,
                                  line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimiser.zero_grad()
        scores = bags.scores(weights) + others
        found = softplus(scores[worse] - scores[better]).sum() + penalty * weights.square().sum() / 2
        found.backward()
        return found

    optimiser.step(loss)
    return Lexical(weights.detach())
