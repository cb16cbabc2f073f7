"""What a reward model learns from: pairs of answers, all of a question in one forward pass."""

from dataclasses import dataclass

import torch
from torch.nn import functional

from stages.modeling.load import autocast
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.reward_model import read
from stages.reward_modeling.scoring_file import Scoring


@dataclass(frozen=True)
class PairwiseLoss:
    """Options of the loss; see the recipe's section reward, whose names these are."""

    margin_per_score: float = 0.0
    label_smoothing: float = 0.0
    centring_weight: float = 0.0
    language_model_weight: float = 0.0

    def summed_loss(self, model, items: list[Example], scoring: Scoring, precision: str) -> torch.Tensor:
        """The loss of every pair, summed, fp32. Each answer is computed once, and each question once for all of its."""
        texts = pack_with_shared_prefix([item.prompt for item in items], [item.answers for item in items], model.device)
        with autocast(precision):
            found = read(model, texts, scoring, log_p=bool(self.language_model_weight))
        better, worse = pair_indices(items)
        given = [score for item in items for score in item.given or [0.0] * len(item.answers)]
        scores = found.scores + torch.tensor(given, device=model.device)
        gaps = torch.tensor([gap for item in items for gap in item.gaps], device=model.device)
        losses = pairwise_losses(scores[better], scores[worse], self.margin_per_score * gaps,
                                 self.label_smoothing, self.centring_weight)
        if self.language_model_weight:
            losses = losses - self.language_model_weight * found.log_p[better]
        return losses.sum()


def pairwise_losses(
    better: torch.Tensor,
    worse: torch.Tensor,
    margins: torch.Tensor | float = 0.0,
    label_smoothing: float = 0.0,
    centring: float = 0.0,
) -> torch.Tensor:
    """-log sigmoid(r_j - r_k - margin) of each pair, all [B] (InstructGPT eq. 1; margins: Llama 2, eq. 2).

    ln 2 when scores tie and there is no margin. label_smoothing: the share of pairs held to be the wrong way round
    (conservative loss, Mitchell 2023). centring: times (r_j + r_k)^2, which keeps scores around 0 (Eisenstein et al.
    2023, as in TRL).
    """
    gap = better - worse - margins
    losses = -functional.logsigmoid(gap)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * functional.logsigmoid(-gap)
    return losses + centring * (better + worse) ** 2
