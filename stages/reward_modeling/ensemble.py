"""Several reward models as one: the mean of their scores, less some of how far they are apart.

Where policies drift off what reward models have seen, those disagree first: taking some of their spread from the mean
keeps PPO from a reward that one of them alone gives (Coste et al. 2023, arXiv 2310.02743). Shapes: B rows.
"""

from collections.abc import Sequence

import torch

from stages.reward_modeling.scorer import Scorer


class Ensemble:
    """Prompts and answers to rewards, as a Scorer; each member's zero is where its own reference answers average.

    spread_penalty: times the members' standard deviation, taken from their mean.
    """

    def __init__(self, scorers: Sequence[Scorer], spread_penalty: float = 0.0):
        self.scorers, self.spread_penalty = list(scorers), spread_penalty
        stds = [scorer.std for scorer in self.scorers]
        self.std = None if None in stds else sum(stds) / len(stds)

    def __call__(self, prompts: list[list[int]], answers: list[list[int]]) -> torch.Tensor:
        """Rewards [B] fp32 on the CPU."""
        scores = torch.stack([scorer(prompts, answers) for scorer in self.scorers])
        return scores.mean(0) - self.spread_penalty * scores.std(0, correction=0)


def members(scorer: "Scorer | Ensemble") -> list[Scorer]:
    """The scorers of one model each."""
    return scorer.scorers if isinstance(scorer, Ensemble) else [scorer]


def scorer_of(scorers: Sequence[Scorer], spread_penalty: float = 0.0) -> "Scorer | Ensemble":
    """One scorer is itself."""
    return scorers[0] if len(scorers) == 1 else Ensemble(scorers, spread_penalty)
