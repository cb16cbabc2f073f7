"""Objectives against plain arithmetic (CORRECTNESS R1, P2, P3, K1, K2, P13)."""

import math

import pytest
import torch

from stages.learning.losses import kl_k1, kl_k3, masked_mean, pairwise_loss, policy_loss, value_loss


def test_pairwise_loss_is_ln_2_when_scores_tie():
    assert float(pairwise_loss(torch.tensor([0.3, -2.0]), torch.tensor([0.3, -2.0]))) == pytest.approx(math.log(2))


def test_pairwise_loss_against_plain_python():
    better, worse = [1.5, -0.2, 0.0], [0.5, 0.7, -3.0]
    expected = sum(-math.log(1 / (1 + math.exp(-(b - w)))) for b, w in zip(better, worse, strict=True)) / 3
    assert float(pairwise_loss(torch.tensor(better), torch.tensor(worse))) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    "ratio, advantage, moves",
    [(1.5, 1.0, False), (0.5, -1.0, False), (0.5, 1.0, True), (1.5, -1.0, True), (1.1, 1.0, True)],
)
def test_policy_loss_has_no_gradient_where_clipping_says_so(ratio, advantage, moves):
    r = torch.tensor([[ratio]], requires_grad=True)
    policy_loss(r, torch.tensor([[advantage]]), 0.2).sum().backward()
    assert float(r.grad) == (-advantage if moves else 0.0)


def test_policy_loss_values():
    ratio, advantages = torch.tensor([[1.5, 0.5, 1.5]]), torch.tensor([[2.0, 2.0, -2.0]])
    assert policy_loss(ratio, advantages, 0.2).tolist() == [pytest.approx([-2.4, -1.0, 3.0])]


def test_value_loss_takes_the_larger_error():
    values, old, returns = torch.tensor([[1.0, 0.1]]), torch.tensor([[0.0, 0.0]]), torch.tensor([[1.0, 1.0]])
    # first: unclipped error 0, clipped value 0.2 -> 0.5 * 0.64; second: 0.1 lies within the range -> 0.5 * 0.81
    assert value_loss(values, old, returns, 0.2).tolist() == [pytest.approx([0.32, 0.405])]


def test_masked_mean_ignores_what_is_masked_even_infinities():
    values = torch.tensor([[1.0, 3.0, float("inf")], [5.0, float("nan"), 7.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    assert float(masked_mean(values, mask)) == pytest.approx(3.0)


@pytest.mark.parametrize("mu, k1_sd, k3_sd", [(0.1, 20.0, 1.42), (1.0, 2.0, 1.70)])
def test_kl_estimators_on_two_normals(mu, k1_sd, k3_sd):
    """x ~ N(0,1), the other N(mu,1): both unbiased, relative deviations as in CORRECTNESS K2."""
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_p, log_q = -0.5 * x**2, -0.5 * (x - mu) ** 2
    true = mu**2 / 2
    for estimate, sd in ((kl_k1(log_p, log_q), k1_sd), (kl_k3(log_p, log_q), k3_sd)):
        assert float(estimate.mean()) == pytest.approx(true, rel=5 * sd / math.sqrt(len(x)))
        assert float(estimate.std()) / true == pytest.approx(sd, rel=0.03)
    assert float(kl_k3(log_p, log_q).min()) >= 0 > float(kl_k1(log_p, log_q).min())
