"""Losses of direct preference optimisation: DPO (Rafailov et al. 2023, eq. 7) and IPO (Azar et al. 2023, eq. 17).

Shapes: B pairs, A answers. A log-ratio is log pi(answer) - log pi_ref(answer) of a whole answer, in nats.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from stages.modeling.load import autocast
from stages.preference.logprobs import ReferencedExample, answer_logprobs
from stages.reward_modeling.dataset import pair_indices
from stages.reward_modeling.loss import pairwise_losses

LossName = Literal["sigmoid", "ipo"]


@dataclass(frozen=True)
class PreferenceLoss:
    """Settings of the loss, named and explained as in the recipe's section dpo."""

    loss: LossName
    beta: float
    label_smoothing: float

    def summed_loss(self, model, rows: list[ReferencedExample], precision: str) -> torch.Tensor:
        """Sum the losses of all pairs, fp32. Each question and each answer is computed once."""
        with autocast(precision):
            logprobs = answer_logprobs(model, [row.example for row in rows])
        return self.losses(logprobs, rows).sum()

    def losses(self, logprobs: torch.Tensor, rows: list[ReferencedExample]) -> torch.Tensor:
        """Compute the loss of each pair [B] from the log-probabilities [A] of the answers of all rows."""
        device = logprobs.device
        ratios = logprobs - torch.tensor([ref for row in rows for ref in row.ref_logprobs], device=device)
        tokens = torch.tensor([len(answer) for row in rows for answer in row.example.answers], device=device)
        better, worse = pair_indices([row.example for row in rows])
        return preference_losses(ratios[better], ratios[worse], tokens[better], tokens[worse], loss=self.loss,
                                 beta=self.beta, label_smoothing=self.label_smoothing)


def preference_losses(
    better: torch.Tensor, worse: torch.Tensor, better_tokens: torch.Tensor, worse_tokens: torch.Tensor, *,
    loss: LossName, beta: float, label_smoothing: float = 0.0,
) -> torch.Tensor:
    """Compute the loss of each pair [B] from the log-ratios [B] of its better and its worse answer.

    'sigmoid': -log sigmoid(beta (better - worse)), the reward model's loss on implicit rewards, beta times a log-ratio.
    label_smoothing: assumed share of pairs labelled the wrong way round (conservative DPO, Mitchell 2023). 'ipo':
    (better / its tokens - worse / its tokens - 1 / (2 beta))^2. The mean per token is that of the paper's experiments,
    according to TRL's documentation: the sum would grow with the answer's length.
    """
    if loss == "ipo":
        return pairwise_losses(better / better_tokens, worse / worse_tokens, 1 / (2 * beta), loss="squared")
    return pairwise_losses(beta * better, beta * worse, label_smoothing=label_smoothing)
