"""ILQL's losses, as pure functions of what the model computes for each answer token (Snell et al., arXiv 2206.11871).

The formulas are those of trlX. A state is a prompt with the answer so far, an action is the next token.
Shapes: M answer tokens of all rows, H Q heads.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch


class TokenValues(NamedTuple):
    """What model and heads compute for the answer tokens, the actions, in the states before them; all fp32.

    logprobs [M]: log-probability of the action under the model. q_values [H, M]: Q of the action. q_logprobs [H, M]:
    the action's log softmax over the Q of all tokens. target_q_values [H, M]: by the target heads. values [M]: V of the
    state. next_values [M]: V of the next state, 0 after the last action of an answer. rewards [M].
    """

    logprobs: torch.Tensor
    q_values: torch.Tensor
    q_logprobs: torch.Tensor
    target_q_values: torch.Tensor
    values: torch.Tensor
    next_values: torch.Tensor
    rewards: torch.Tensor


@dataclass(frozen=True)
class LossSettings:
    """Settings of the loss, named and explained as in the recipe's section ilql."""

    gamma: float
    tau: float
    cql_scale: float
    awac_scale: float
    awac_beta: float


def token_losses(tokens: TokenValues, settings: LossSettings) -> dict[str, torch.Tensor]:
    """Compute the terms of the loss of each action, [M] each, without their scales.

    td: (Q - r - gamma V')^2, summed over the heads. expectile: |tau - 1(u < 0)| u^2 of u = min Q_target - V. cql:
    -log softmax(Q) of the action, summed over the heads. awac: -log p of the action, weighted by exp(beta u).
    """
    targets = tokens.rewards + settings.gamma * tokens.next_values.detach()
    target_q = tokens.target_q_values.detach().amin(0)
    advantages = target_q - tokens.values
    weights = torch.where(advantages >= 0, settings.tau, 1 - settings.tau)
    return {
        "td": (tokens.q_values - targets).square().sum(0),
        "expectile": weights * advantages.square(),
        "cql": -tokens.q_logprobs.sum(0),
        "awac": -(settings.awac_beta * advantages.detach()).exp() * tokens.logprobs,
    }


def total_loss(losses: dict[str, torch.Tensor], settings: LossSettings) -> torch.Tensor:
    """Combine the terms of the loss with their scales."""
    return (losses["td"] + losses["expectile"] + settings.cql_scale * losses["cql"]
            + settings.awac_scale * losses["awac"])


def shift_to_next(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return V of the next state [M] from V of each state [M], 0 at the end of each of the rows of `lengths` tokens."""
    following = torch.cat([values[1:], values.new_zeros(1)])
    ends = torch.tensor(lengths, device=values.device).cumsum(0) - 1
    return following.index_fill(0, ends, 0.0)


def final_rewards(rewards: list[float], lengths: list[int], device: torch.device) -> torch.Tensor:
    """Return the reward of each action [M]: that of the answer at its last token, 0 elsewhere."""
    ends = torch.tensor(lengths).cumsum(0) - 1
    return torch.zeros(sum(lengths)).index_copy_(0, ends, torch.tensor(rewards)).to(device)
