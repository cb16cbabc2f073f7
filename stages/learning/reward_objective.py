"""What a reward model learns from: pairs of answers, all of a question in one forward pass."""

from dataclasses import dataclass

import torch

from stages.learning.losses import pairwise_losses
from stages.learning.preference_data import Example, pair_indices
from stages.learning.reward_model import Scoring, read
from stages.modeling.load import autocast
from stages.modeling.packed.shared_prefix import pack_with_shared_prefix


@dataclass(frozen=True)
class Objective:
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
