"""A term of the reward that looks words up: counts of an answer's tokens and pairs of neighbours, and its length.

A small trunk learns little about which words people prefer from a few thousand pairs; a logistic regression over counts
learns that, with a strong penalty, and knows no more. It is learnt first, alone: a convex problem, one answer. The
head then learns what this term leaves, on scores that come from other questions (out of fold; Wolpert 1992, stacked
generalisation): on what it was itself fitted to, it would leave nothing to learn.
Shapes: B answers, K buckets, T entries (an answer's different words, over all answers).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import segment_reduce
from torch.nn.functional import softplus

FILE = "lexical.safetensors"
MIXING = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)  # odd, of no pattern: products with them spread over all 64 bits
STEPS, LEAST_SLOPE, LEAST_CHANGE = 200, 1e-7, 1e-12
HISTORY = 20  # steps that L-BFGS remembers, two vectors of all weights each
BLOCK = 64  # answers worked on at a time
LENGTH_UNIT = 10.0  # times log(1 + characters): so large that the penalty hardly holds the length's weight back
LOGARITHMS = torch.log1p(torch.arange(2**15, dtype=torch.float64))  # of what a count may be


class Counts(NamedTuple):
    """Answers as bags, 6 bytes an entry: buckets [T] int32 and their counts times [T] int16, of answer after answer;
    how many entries each has, sizes [B]; LENGTH_UNIT log(1 + characters), lengths [B]."""

    buckets: torch.Tensor
    times: torch.Tensor
    sizes: torch.Tensor
    lengths: torch.Tensor

    def scores(self, weights: torch.Tensor) -> torch.Tensor:
        """[B], given a weight for each bucket and, the last, one for the length [K + 1]; float64, as all products."""
        found = [segment_reduce(weights.index_select(0, buckets).mul_(values), "sum", lengths=sizes, initial=0)
                 for buckets, values, sizes in self._blocks()]
        return torch.cat([weights.new_zeros(0), *found]) + weights[-1] * self.lengths

    def slope(self, by_score: torch.Tensor, buckets: int) -> torch.Tensor:
        """By each weight [K + 1], given a slope by each score [B]."""
        found = torch.zeros(buckets + 1, dtype=torch.float64)
        for (here, values, sizes), slopes in zip(self._blocks(), by_score.split(BLOCK), strict=True):
            found.index_add_(0, here, slopes.repeat_interleave(sizes).mul_(values))
        found[-1] = by_score @ self.lengths
        return found

    def _blocks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """A few answers at a time: buckets, log(1 + count), sizes. What is made of all at once would not fit."""
        parts = [part for part in self.sizes.split(BLOCK) if len(part)]
        entries = [int(part.sum()) for part in parts]
        for sizes, here, times in zip(parts, self.buckets.split(entries), self.times.split(entries), strict=True):
            yield here, LOGARITHMS.index_select(0, times.int()), sizes


@dataclass(frozen=True)
class Lexical:
    """On the CPU. weights [K + 1] float64: of each bucket and, the last, of the length. characters [V] int64: of each
    token."""

    weights: torch.Tensor
    characters: torch.Tensor

    def __call__(self, answers: Sequence[list[int]]) -> torch.Tensor:
        """Scores [B] fp32 on the CPU."""
        return counts(answers, len(self.weights) - 1, self.characters).scores(self.weights).float()

    def save(self, folder: Path) -> None:
        save_file(vars(self), folder / FILE)

    @classmethod
    def load(cls, folder: Path, needed: bool = False) -> "Lexical | None":
        """The one that a reward model in `folder` has, if any; ValueError where it is needed and lost."""
        if (folder / FILE).is_file():
            return cls(**load_file(folder / FILE))
        if needed:
            raise ValueError(f"{folder} has lost its {FILE}, a part of its scores: copy the whole folder")
        return None


def characters_of(tokenizer) -> torch.Tensor:
    """How many characters (bytes, where the tokenizer splits those) each token stands for [V] int64; a special one: 0.

    People who prefer the longer answer see characters: counted in tokens, the term would be wrong about near ties.
    """
    vocabulary, special = tokenizer.get_vocab(), set(tokenizer.all_special_ids)  # each made anew when asked for
    found = torch.zeros(1 + max(vocabulary.values()), dtype=torch.int64)
    for token, number in vocabulary.items():
        found[number] = 0 if number in special else len(token)
    return found


def counts(answers: Sequence[list[int]], buckets: int, characters: torch.Tensor) -> Counts:
    """Each token, and each pair of neighbours, falls into one of `buckets` by its hash; those of one bucket add up."""
    most = sum(2 * len(answer) for answer in answers)
    words, times = np.empty(most, np.int32), np.empty(most, np.int16)  # memory is taken up as they are filled
    ends, lengths, width = [0], [], characters.numpy()
    for answer in answers:
        tokens = np.asarray(answer, dtype=np.uint64)
        found, often = np.unique(_hashed(tokens, buckets), return_counts=True)
        here = slice(ends[-1], ends[-1] + len(found))
        words[here], times[here] = found, np.minimum(often, len(LOGARITHMS) - 1)
        ends.append(here.stop)
        lengths.append(LENGTH_UNIT * math.log1p(width[tokens].sum()))
    return Counts(
        torch.from_numpy(words[: ends[-1]]),
        torch.from_numpy(times[: ends[-1]]),
        torch.tensor(ends).diff(),
        torch.tensor(lengths, dtype=torch.float64),
    )


def _hashed(tokens: np.ndarray, buckets: int) -> np.ndarray:
    single, pair = (np.uint64(number) for number in MIXING)
    mixed = np.concatenate([(tokens + np.uint64(1)) * single, ((tokens[:-1] * single) ^ tokens[1:]) * pair])
    return (mixed >> np.uint64(32)) % np.uint64(buckets)


def fitted(
    bags: Counts, better: Sequence[int], worse: Sequence[int], *, buckets: int, penalty: float, others: torch.Tensor
) -> torch.Tensor:
    """The weights [K + 1] of least sum of -log sigmoid(s_better - s_worse), plus penalty |weights|^2 / 2, by L-BFGS.

    better, worse: of each pair, the numbers of its answers. others [B]: what else is in an answer's score.
    """
    weights = torch.zeros(buckets + 1, dtype=torch.float64)
    better, worse = torch.as_tensor(better), torch.as_tensor(worse)
    optimiser = torch.optim.LBFGS([weights], max_iter=STEPS, tolerance_grad=LEAST_SLOPE, tolerance_change=LEAST_CHANGE,
                                  history_size=HISTORY, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        scores = bags.scores(weights) + others
        gaps = scores[worse] - scores[better]
        by_gap = gaps.sigmoid()
        by_score = torch.zeros_like(scores).index_add_(0, worse, by_gap).index_add_(0, better, -by_gap)
        weights.grad = bags.slope(by_score, buckets) + penalty * weights
        return softplus(gaps).sum() + penalty * weights.square().sum() / 2

    optimiser.step(loss)
    weights.grad = None
    return weights
