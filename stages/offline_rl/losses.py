"""ILQL's losses, as pure functions of what the model computes for each answer token (Snell et al., arXiv 2206.11871).

Also their means over held-out answers. The formulas are those of trlX. A state is a prompt with the answer so far, an
action is the next token.
Shapes: M answer tokens of all rows, H Q heads, N held-out answers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from stages.distributed import group
from stages.distributed.units import own_units, sum_in_order
from stages.modeling.packed.forward import chunk_by_length
from stages.offline_rl.dataset import ScoredAnswer

PREFIX = "validation_"


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


@torch.no_grad()
def measure_answers(
    model: Callable[[list[ScoredAnswer]], TokenValues], answers: list[ScoredAnswer], settings: LossSettings,
    forward_answers: int
) -> dict[str, float]:
    """Compute the mean losses per token, mean Q and V per token, and how the last Q of an answer agrees with its score.

    validation_score_correlation is Pearson's, of min Q_target at each answer's last token and its reward. The rows are
    shared among the processes. forward_answers: rows in one forward pass.
    """
    lengths = [len(row.prompt) + len(row.answer) for row in answers]
    sums, last_q = {}, torch.zeros(len(answers), dtype=torch.float64)
    chunks = list(chunk_by_length(lengths, forward_answers))
    for number, chunk in own_units(enumerate(chunks)):
        tokens = model([answers[i] for i in chunk])
        losses = token_losses(tokens, settings)
        target_q = tokens.target_q_values.amin(0)
        columns = torch.stack([total_loss(losses, settings), *losses.values(), target_q, tokens.values])
        sums[number] = columns.double().sum(1).cpu()
        ends = torch.tensor([len(answers[i].answer) for i in chunk]).cumsum(0) - 1
        last_q[torch.tensor(chunk)] = target_q.double().cpu()[ends]
    names = ("loss", "td", "expectile", "cql", "awac", "q", "v")
    means = sum_in_order(sums, len(chunks), len(names)) / sum(len(row.answer) for row in answers)
    rewards = torch.tensor([row.reward for row in answers], dtype=torch.float64)
    correlation = _correlation(group.sum_tensor(last_q), rewards)
    return {f"{PREFIX}{name}": value for name, value in zip(names, means.tolist(), strict=True)} | (
        {} if correlation is None else {f"{PREFIX}score_correlation": correlation})


def _correlation(a: torch.Tensor, b: torch.Tensor) -> float | None:
    """Return Pearson's correlation; None if one side does not vary."""
    if len(a) < 2 or not (a.std() > 0 and b.std() > 0):
        return None
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])
