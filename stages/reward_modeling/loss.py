"""Pairwise loss of the reward model; all answers to a question share one forward pass."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch.nn import functional

from stages.modeling.load import autocast
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix
from stages.reward_modeling.dataset import Example, pair_indices
from stages.reward_modeling.reward_model import score_packed
from stages.reward_modeling.scoring_file import Scoring

LossName = Literal["sigmoid", "squared"]


@dataclass(frozen=True)
class PairwiseLoss:
    """Settings of the loss, named and explained as in the recipe's section reward."""

    loss: LossName
    margin_per_score: float
    label_smoothing: float
    centring_weight: float
    language_model_weight: float

    def summed_loss(self, model, items: list[Example], scoring: Scoring, precision: str) -> torch.Tensor:
        """Sum the losses of all pairs, fp32. Each question and each answer is computed once."""
        packed = pack_with_shared_prefix(
            [item.prompt for item in items], [item.answers for item in items], model.device)
        with autocast(precision):
            output = score_packed(model, packed, scoring, with_logprobs=bool(self.language_model_weight))
        better, worse = pair_indices(items)
        score_gaps = torch.tensor([gap for item in items for gap in item.score_gaps], device=model.device)
        losses = pairwise_losses(output.scores[better], output.scores[worse], self.margin_per_score * score_gaps,
                                 self.label_smoothing, self.centring_weight, self.loss)
        if self.language_model_weight:
            losses = losses - self.language_model_weight * output.mean_logprobs[better]
        return losses.sum()


def pairwise_losses(better: torch.Tensor, worse: torch.Tensor, margins: torch.Tensor | float = 0.0,
                    label_smoothing: float = 0.0, centring: float = 0.0, loss: LossName = "sigmoid") -> torch.Tensor:
    """Compute -log sigmoid(r_j - r_k - margin) of each pair [B] (InstructGPT, eq. 1; margins: Llama 2, eq. 2).

    label_smoothing: assumed share of pairs labelled the wrong way round (conservative loss, Mitchell 2023). centring:
    coefficient of (r_j + r_k)^2, which keeps scores around 0 (Eisenstein et al. 2023, as in TRL). loss: 'squared' is
    (r_j - r_k - margin)^2, without smoothing (Pahikkala et al. 2007).
    """
    gap = better - worse - margins
    losses = gap ** 2 if loss == "squared" else -functional.logsigmoid(gap)
    if label_smoothing:
        losses = (1 - label_smoothing) * losses - label_smoothing * functional.logsigmoid(-gap)
    return losses + centring * (better + worse) ** 2
