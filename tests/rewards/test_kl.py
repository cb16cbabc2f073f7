"""KL: estimators against plain arithmetic and exact sums, and the controller (CORRECTNESS K1-K7)."""

import json
import math
import random

import pytest
import torch

from stages.generation.rollout import Rollout
from stages.recipe.sections.ppo import Ppo
from stages.rewards.kl import ESTIMATORS, KlController, kl_k1, kl_k2, kl_k3, kl_penalised_rewards
from tests.helpers.trajectories import build_trajectory
from tests.parity.golden.support import GivenPolicy, float64, rows_of

EXACT = {
    "k1": lambda log_p, log_q: log_p - log_q,
    "k2": lambda log_p, log_q: (log_p - log_q) ** 2 / 2,
    "k3": lambda log_p, log_q: math.exp(log_q) / math.exp(log_p) - 1 - (log_q - log_p),
    "absolute": lambda log_p, log_q: max(log_p - log_q, log_q - log_p),
}


@pytest.mark.parametrize("name", EXACT)
def test_an_estimate_is_its_formula(name):
    rng = random.Random(0)
    pairs = [(-rng.expovariate(0.5), -rng.expovariate(0.5)) for _ in range(200)]
    log_p, log_q = torch.tensor(pairs, dtype=torch.float64).T
    expected = [EXACT[name](p, q) for p, q in pairs]
    assert ESTIMATORS[name](log_p, log_q).tolist() == pytest.approx(expected, abs=1e-12)
    assert (min(expected) < 0) == (name == "k1")
    assert set(ESTIMATORS) == set(EXACT) == set(Ppo.__annotations__["kl_estimator"].__args__)


def test_k3_of_a_small_step_keeps_its_digits_in_fp32():
    """exp(x) - 1 - x in fp32 is noise of 6e-8 around values of 5e-9, and often negative."""
    log_ratio = torch.linspace(-1e-2, 1e-2, 200_001)
    computed, expected = kl_k3(torch.zeros_like(log_ratio), log_ratio), log_ratio.double() ** 2 / 2
    assert float(computed.min()) >= 0
    clear = log_ratio.abs() > 1e-4
    assert torch.allclose(computed.double()[clear], expected[clear], rtol=6e-3)  # 1e-2 / 3: the series' next term


@pytest.mark.parametrize(
    "mu, bias, deviations", [(0.1, 0.0025, (20.0, 1.42, 1.42)), (1.0, 0.25, (2.0, 1.73, 1.70))]
)
def test_estimators_on_two_normals(mu, bias, deviations):
    """x ~ N(0, 1), the other N(mu, 1): bias and relative standard deviation as in Schulman's note (K2)."""
    x = torch.randn(2_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    log_p, log_q, true = -0.5 * x**2, -0.5 * (x - mu) ** 2, mu**2 / 2
    for estimate, off, sd in zip((kl_k1, kl_k2, kl_k3), (0.0, bias, 0.0), deviations, strict=True):
        computed = estimate(log_p, log_q)
        assert float(computed.mean()) / true - 1 == pytest.approx(off, abs=4 * sd / math.sqrt(len(x)))
        assert float(computed.std()) / true == pytest.approx(sd, rel=0.03)
    assert float(kl_k1(log_p, log_q).min()) < 0


def two_distributions() -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [12] of a policy, with gradient, and log-probabilities of a reference."""
    draw = torch.Generator().manual_seed(0)
    logits, reference = torch.randn(2, 12, generator=draw, dtype=torch.float64)
    return logits.requires_grad_(), torch.log_softmax(reference, -1)


def gradient_of_the_kl() -> torch.Tensor:
    logits, log_q = two_distributions()
    log_p = torch.log_softmax(logits, -1)
    return torch.autograd.grad((log_p.exp() * (log_p - log_q)).sum(), logits)[0]


@pytest.mark.parametrize("name, is_the_kl", [("k1", True), ("k2", False), ("k3", False), ("absolute", False)])
def test_only_k1_in_the_reward_descends_the_kl(name, is_the_kl):
    """E[k * grad log p] by the exact sum over all tokens: k1's is the gradient of KL(p || q) (K3)."""
    logits, log_q = two_distributions()
    log_p = torch.log_softmax(logits, -1)
    one = torch.ones(12, 1, dtype=torch.float64)
    rewards = kl_penalised_rewards(torch.zeros(12), log_p[:, None], log_q[:, None], one, 1.0, name)
    assert not rewards.requires_grad
    surrogate = (log_p.exp().detach() * -rewards.squeeze(-1) * log_p).sum()
    computed, expected = torch.autograd.grad(surrogate, logits)[0], gradient_of_the_kl()
    assert (float((computed - expected).norm()) < 1e-12) == is_the_kl
    assert is_the_kl or float((computed - expected).norm() / expected.norm()) > 0.1


def test_no_estimate_is_a_loss():
    """Sampled, differentiated and averaged: k1's gradient is 0, k3's is that of KL(q || p) (K4)."""
    logits, log_q = two_distributions()
    log_p = torch.log_softmax(logits, -1)
    weight = log_p.exp().detach()
    computed = torch.autograd.grad((weight * kl_k1(log_p, log_q)).sum(), logits, retain_graph=True)[0]
    assert float(computed.norm()) < 1e-12 < float(gradient_of_the_kl().norm())
    computed = torch.autograd.grad((weight * kl_k3(log_p, log_q)).sum(), logits, retain_graph=True)[0]
    reverse = torch.autograd.grad((log_q.exp() * (log_q - log_p)).sum(), logits)[0]
    assert torch.allclose(computed, reverse, atol=1e-12)
    assert float((computed - gradient_of_the_kl()).norm() / computed.norm()) > 0.1


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_the_kl_reported_is_k1_summed_over_a_response_whatever_the_penalty(name):
    """K5: the mean over responses of sums over their tokens; what stands beyond an end has no part in it."""
    draw, lengths = torch.Generator().manual_seed(1), [3, 1, 5, 2]
    mask = (torch.arange(5) < torch.tensor(lengths)[:, None]).double()
    log_p, ref_logprobs, values = -torch.rand(3, 4, 5, generator=draw, dtype=torch.float64)
    policy = GivenPolicy(log_p, values, mask, ref_logprobs)
    rollout = Rollout(**rows_of(mask), ended=[True] * 4)
    with float64():
        trajectory = build_trajectory(policy, rollout, torch.zeros(4), 0.1, forward_prompts=3, kl_estimator=name)
    by_hand = [sum(float(log_p[r, t] - ref_logprobs[r, t]) for t in range(n)) for r, n in enumerate(lengths)]
    assert trajectory.sequence_kl() == pytest.approx(sum(by_hand) / 4, abs=1e-12)


def make_controller(**changed) -> KlController:
    return KlController(**({"kl_coefficient": 0.2, "target_nats": 6.0, "horizon_responses": 10_000} | changed))


def test_beta_stays_at_the_target():
    controller = make_controller()
    for _ in range(100):
        controller.update(6.0, 64)
    assert controller.kl_coefficient == 0.2


def test_beta_moves_towards_the_target_and_no_further_than_its_horizon_allows():
    rng, controller = random.Random(0), make_controller()
    for _ in range(500):
        before, kl, responses = controller.kl_coefficient, rng.uniform(-20, 40), rng.choice([8, 64, 512])
        controller.update(kl, responses)
        assert (controller.kl_coefficient > before) == (kl > 6.0) and controller.kl_coefficient > 0
        share = controller.kl_coefficient / before - 1
        assert abs(share) <= 0.2 * responses / 10_000 * (1 + 1e-9)
        assert share == pytest.approx(max(-0.2, min(0.2, kl / 6.0 - 1)) * responses / 10_000, rel=1e-6)


def test_beta_finds_the_coefficient_that_meets_the_target():
    """A policy whose KL falls as beta rises: kl = 3 / beta is 6 at 0.5."""
    controller = make_controller(horizon_responses=1000)
    for _ in range(1000):
        controller.update(3 / controller.kl_coefficient, 64)
    assert controller.kl_coefficient == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("kl, share", [(math.inf, 0.2), (-math.inf, -0.2)])
def test_a_kl_without_bound_moves_beta_as_far_as_any(kl, share):
    controller = make_controller()
    controller.update(kl, 64)
    assert controller.kl_coefficient == pytest.approx(0.2 * (1 + share * 64 / 10_000))


def test_without_a_target_beta_is_fixed():
    controller = make_controller(target_nats=None)
    controller.update(40.0, 64)
    assert controller.kl_coefficient == 0.2


def test_a_restored_controller_goes_on_as_if_nothing_had_been():
    one, other = make_controller(), make_controller()
    one.update(9.0, 64)
    other.restore(json.loads(json.dumps(one.state())))
    for controller in (one, other):
        controller.update(2.0, 64)
    assert one.kl_coefficient == other.kl_coefficient != 0.2


def test_what_cannot_steer_is_refused():
    for wrong in ({"target_nats": 0.0}, {"target_nats": -1.0}, {"horizon_responses": 0}):
        with pytest.raises(ValueError, match="must be above 0"):
            make_controller(**wrong)
    with pytest.raises(ValueError, match="KL is NaN"):
        make_controller().update(math.nan, 64)


def test_defaults_are_the_published_ones():
    recipe = Ppo()
    assert recipe.kl_estimator == "k1"
    assert (recipe.kl_coefficient, recipe.kl_target_nats, recipe.kl_horizon_responses) == (0.2, 6.0, 10_000)
    assert recipe.update_kl_limit == pytest.approx(1.5 * 0.1)
