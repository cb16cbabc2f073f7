"""ILQL's losses, reward scale, synchronisation and shifted policy against plain loops of trlX's formulas."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from stages.modeling.q_heads import QHeads, ShiftedOutput
from stages.offline_rl.dataset import ScoredAnswer, measure_scale, normalise_rewards
from stages.offline_rl.losses import (
    LossSettings,
    TokenValues,
    final_rewards,
    shift_to_next,
    token_losses,
    total_loss,
)
from stages.offline_rl.model import ILQLHeads

GOLDEN = json.loads((Path(__file__).parent / "golden/ilql.json").read_text())
ROWS = GOLDEN["inputs"]["rows"]
LENGTHS = [len(row["actions"]) for row in ROWS]


def joined(name: str) -> torch.Tensor:
    """Return a column of all rows, [M, ...]; of V without the state after the last action."""
    return torch.tensor([value for row, length in zip(ROWS, LENGTHS, strict=True) for value in row[name][:length]],
                        dtype=torch.float64)


def token_values() -> TokenValues:
    actions = joined("actions").long()
    pick = lambda values: values.gather(-1, actions.expand(values.shape[:-1])[..., None]).squeeze(-1)  # noqa: E731
    q, target_q = (joined(name).transpose(0, 1) for name in ("q", "target_q"))
    answers = [ScoredAnswer([1], row["actions"], row["score"]) for row in ROWS]
    rewards = [answer.reward for answer in normalise_rewards(answers, measure_scale(answers))]
    assert rewards == pytest.approx(GOLDEN["returns"], rel=1e-12)
    return TokenValues(
        logprobs=pick(joined("logits").log_softmax(-1)), q_values=pick(q), q_logprobs=pick(q.log_softmax(-1)),
        target_q_values=pick(target_q), values=joined("v"), next_values=shift_to_next(joined("v"), LENGTHS),
        rewards=final_rewards(rewards, LENGTHS, torch.device("cpu")))


def test_every_term_of_the_loss():
    settings = LossSettings(**GOLDEN["settings"])
    losses = token_losses(token_values(), settings)
    actual = {name: float(values.mean()) for name, values in losses.items()}
    actual["loss"] = float(total_loss(losses, settings).mean())
    assert actual == pytest.approx(GOLDEN["losses"], rel=1e-6)  # rewards are fp32


def test_gradients_reach_q_and_v_as_published():
    """V learns from the expectile term alone, Q from TD and CQL, the model from AWAC; targets from nothing."""
    tokens = TokenValues(*(value.clone().requires_grad_(value.dtype.is_floating_point) for value in token_values()))
    settings = LossSettings(**GOLDEN["settings"])
    reached = {}
    for name, values in token_losses(tokens, settings).items():
        gradients = torch.autograd.grad(values.sum(), tokens, allow_unused=True)
        reached[name] = {field for field, gradient in zip(tokens._fields, gradients, strict=True)
                         if gradient is not None and gradient.abs().sum() > 0}
    assert reached == {"td": {"q_values", "rewards"}, "expectile": {"values"}, "cql": {"q_logprobs"},
                       "awac": {"logprobs"}}


def test_targets_are_polyak_averages():
    heads = ILQLHeads(2, 3)
    values = [torch.tensor(GOLDEN["inputs"][name]).view(3, 2) for name in ("head", "target")]
    with torch.no_grad():
        for module, value in zip((heads.q_heads, heads.target_q_heads), values, strict=True):
            module[1].out.weight.copy_(value.repeat(1, 2))
    heads.synchronise_targets(GOLDEN["rate"])
    expected = torch.tensor(GOLDEN["synchronised"]).view(3, 2).repeat(1, 2)
    assert torch.allclose(heads.target_q_heads[1].out.weight, expected, atol=1e-6)


def test_the_shifted_policy():
    """A layer whose input is the state's number as a one-hot vector: weights are then logits and Q of each state."""
    states = torch.eye(sum(LENGTHS), dtype=torch.float64)
    layer = nn.Linear(*reversed(joined("logits").T.shape), bias=False, dtype=torch.float64)
    layer.weight = nn.Parameter(joined("logits").T.contiguous())
    q = joined("target_q")
    tensors = {}
    for head in range(q.shape[1]):
        tensors |= {f"{head}.hidden.weight": states, f"{head}.hidden.bias": torch.zeros(len(states)).double(),
                    f"{head}.out.weight": q[:, head].T.contiguous(), f"{head}.out.bias": torch.zeros(5).double()}
    with torch.no_grad():
        actual = ShiftedOutput(layer, QHeads(tensors, GOLDEN["beta"]))(states).log_softmax(-1)
    assert torch.allclose(actual, torch.tensor(GOLDEN["shifted_logprobs"], dtype=torch.float64), atol=1e-5)
