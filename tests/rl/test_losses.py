"""Objectives against plain arithmetic (CORRECTNESS R1, P2, P3, P13)."""

import math
import random

import pytest
import torch

from stages.reward_modeling.loss import pairwise_losses
from stages.rl.losses import masked_mean, masked_sum, policy_loss, value_loss


def test_pairwise_loss_is_ln_2_when_scores_tie():
    scores = torch.tensor([0.3, -2.0])
    assert pairwise_losses(scores, scores).tolist() == pytest.approx([math.log(2)] * 2)


def test_pairwise_loss_against_plain_python():
    better, worse = [1.5, -0.2, 0.0], [0.5, 0.7, -3.0]
    expected = [-math.log(1 / (1 + math.exp(-(b - w)))) for b, w in zip(better, worse, strict=True)]
    assert pairwise_losses(torch.tensor(better), torch.tensor(worse)).tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "ratio, advantage, moves",
    [
        (1.5, 1.0, False),  # better than thought and likelier by more than the range allows: enough
        (0.5, -1.0, False),  # worse and less likely: enough
        (0.5, 1.0, True),  # better, yet less likely: all the way back
        (1.5, -1.0, True),  # worse, yet likelier: all the way back
        (1.1, 1.0, True),
        (0.9, -1.0, True),
        (1.0, 2.0, True),
        (1.5, 0.0, False),
    ],
)
def test_policy_loss_has_no_gradient_where_clipping_says_so(ratio, advantage, moves):
    r = torch.tensor([[ratio]], requires_grad=True)
    policy_loss(r, torch.tensor([[advantage]]), 0.2).sum().backward()
    assert float(r.grad) == (-advantage if moves else 0.0)


def test_policy_loss_and_its_gradient_against_plain_python():
    rng = random.Random(0)
    cases = [(rng.gauss(0, 0.4), rng.gauss(0, 1), rng.choice([0.05, 0.2])) for _ in range(200)]
    for log_ratio, advantage, clip in cases:
        x = torch.tensor(log_ratio, dtype=torch.float64, requires_grad=True)
        actual = policy_loss(x.exp(), torch.tensor(advantage, dtype=torch.float64), clip)
        actual.backward()
        ratio = math.exp(log_ratio)
        inside = min(max(ratio, 1 - clip), 1 + clip)
        assert float(actual.detach()) == pytest.approx(max(-advantage * ratio, -advantage * inside), abs=1e-12)
        stopped = (advantage > 0 and ratio > 1 + clip) or (advantage < 0 and ratio < 1 - clip)
        assert float(x.grad) == pytest.approx(0.0 if stopped else -advantage * ratio, abs=1e-12)


def test_value_loss_takes_the_larger_error():
    values, old, returns = torch.tensor([[1.0, 0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    # first: unclipped error 0, clipped value 0.2 -> 0.5 * 0.64; second: 0.1 lies within the range -> 0.5 * 0.81
    assert value_loss(values, old, returns, 0.2).tolist() == [pytest.approx([0.32, 0.405])]


@pytest.mark.parametrize("clip", [0.2, 0.05, None])
def test_value_loss_and_its_gradient_against_plain_python(clip):
    rng, ways = random.Random(1), set()
    for _ in range(200):
        value, old, target = rng.gauss(0, 0.5), rng.gauss(0, 0.5), rng.gauss(0, 1)
        v = torch.tensor(value, dtype=torch.float64, requires_grad=True)
        actual = value_loss(v, *torch.tensor([old, target], dtype=torch.float64), clip)
        actual.backward()
        limited = value if clip is None else min(max(value, old - clip), old + clip)
        plain, clipped = (value - target) ** 2, (limited - target) ** 2
        assert float(actual.detach()) == pytest.approx(0.5 * max(plain, clipped), abs=1e-12)
        stopped = limited != value and clipped > plain  # moved towards the return by more than the range: enough
        assert float(v.grad) == pytest.approx(0.0 if stopped else value - target, abs=1e-12)
        ways.add(stopped)
    assert ways == ({False} if clip is None else {False, True})


def test_masked_means_ignore_what_is_masked_even_infinities():
    values = torch.tensor([[1.0, 3.0, float("inf")], [5.0, float("nan"), 7.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert float(masked_sum(values, mask).detach()) == pytest.approx(9.0)
    mean = masked_mean(values, mask)
    assert float(mean.detach()) == pytest.approx(3.0)
    mean.backward()
    assert torch.equal(values.grad, mask / 3)


def test_pad_columns_change_no_loss():
    draw = torch.Generator().manual_seed(0)
    mask = (torch.arange(6) < torch.tensor([[6], [2], [4]])).float()
    ratio, advantages, values, old, returns = torch.randn(5, 3, 6, generator=draw)

    def means(pads: int) -> list[float]:
        wide = [torch.nn.functional.pad(x, (0, pads), value=1e30) for x in (ratio, advantages, values, old, returns)]
        keep = torch.nn.functional.pad(mask, (0, pads))
        losses = policy_loss(wide[0], wide[1], 0.2), value_loss(*wide[2:], 0.2)
        return [float(masked_mean(loss, keep)) for loss in losses]

    assert means(7) == pytest.approx(means(0), rel=1e-6)
