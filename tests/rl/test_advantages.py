"""Rewards, GAE and whitening against plain loops in float64 (CORRECTNESS A1-A7, P13)."""

import random

import pytest
import torch
from torch.nn.functional import pad

from stages.generation.rollout import Rollout
from stages.recipe.sections.ppo import Ppo
from stages.rewards.kl import ESTIMATORS, kl_penalised_rewards
from stages.rl.advantages import gae, whiten
from tests.helpers.trajectories import build_trajectory
from tests.parity.golden.support import GivenPolicy, float64, rows_of


def draw_ragged(seed: int, rows: int = 5, columns: int = 9):
    generator = torch.Generator().manual_seed(seed)
    lengths = [random.Random(seed * 10 + i).randint(1, columns) for i in range(rows)]
    mask = (torch.arange(columns) < torch.tensor(lengths)[:, None]).double()
    draw = lambda: torch.randn(rows, columns, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(), draw(), mask, lengths


def brute_force(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """Compute one row's advantages as sums of discounted errors; the value after the last token is 0."""
    errors = [r + gamma * after - v for r, v, after in zip(rewards, values, values[1:] + [0.0], strict=True)]
    return [sum((gamma * lam) ** (k - t) * errors[k] for k in range(t, len(errors))) for t in range(len(errors))]


def whitened(numbers: list[float], freedom: int, keep_mean: bool = False) -> list[float]:
    mean = sum(numbers) / len(numbers)
    deviation = (sum((x - mean) ** 2 for x in numbers) / (len(numbers) - freedom) + 1e-8) ** 0.5
    return [(x - mean) / deviation + (mean if keep_mean else 0.0) for x in numbers]


def inside(values: torch.Tensor, lengths: list[int]) -> list[float]:
    return [float(values[row, t]) for row, length in enumerate(lengths) for t in range(length)]


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_gae_equals_the_brute_force_sum(gamma, lam, seed):
    rewards, values, mask, lengths = draw_ragged(seed)
    junk = torch.where(mask > 0, 0.0, float("nan"))
    computed = gae(rewards + junk, values + junk, mask, gamma, lam)
    for row, length in enumerate(lengths):
        expected = brute_force(rewards[row].tolist()[:length], values[row].tolist()[:length], gamma, lam)
        assert computed[row, :length].tolist() == pytest.approx(expected, abs=1e-12)
        assert (computed[row, length:] == 0).all()


@pytest.mark.parametrize("junk", [9.0, float("nan"), float("inf")])
def test_pad_columns_change_no_reward_advantage_or_whitening(junk):
    logprobs, ref_logprobs, mask, _ = draw_ragged(4)
    values, scores = draw_ragged(5)[0], torch.arange(5).double()

    def estimate(pads: int) -> torch.Tensor:
        wide = [torch.where(pad(mask, (0, pads)) > 0, pad(x, (0, pads)), junk)
                for x in (logprobs, ref_logprobs, values)]
        keep = pad(mask, (0, pads))
        rewards = kl_penalised_rewards(scores, wide[0], wide[1], keep, 0.3)
        return whiten(gae(rewards, wide[2], keep, 0.98, 0.9), keep)

    computed = estimate(6)
    assert torch.allclose(computed[:, :-6], estimate(0), atol=1e-12) and (computed[:, -6:] == 0).all()


def test_a_return_is_the_score_less_later_penalties():
    """gamma = lambda = 1 and zero values: by hand (CORRECTNESS failure 15)."""
    logprobs, ref_logprobs, mask, lengths = draw_ragged(2)
    scores = torch.arange(5, dtype=torch.float64)
    token_rewards = kl_penalised_rewards(scores, logprobs, ref_logprobs, mask, 0.3)
    returns = gae(token_rewards, torch.zeros_like(mask), mask, 1.0, 1.0)
    for row, length in enumerate(lengths):
        for t in range(length):
            later = sum(0.3 * float(logprobs[row, k] - ref_logprobs[row, k]) for k in range(t, length))
            assert float(returns[row, t]) == pytest.approx(float(scores[row]) - later, abs=1e-12)


def test_the_score_stands_at_the_last_response_token_and_nowhere_else():
    zero = torch.zeros(3, 4)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    computed = kl_penalised_rewards(torch.tensor([5.0, -7.0, 2.0]), zero, zero, mask, 0.1)
    assert computed.tolist() == [[0, 0, 5, 0], [-7, 0, 0, 0], [0, 0, 0, 2]]


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_a_token_pays_beta_times_its_kl_and_the_last_one_earns_the_score(estimator):
    logprobs, ref_logprobs, mask, lengths = draw_ragged(6)
    scores = torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    computed = kl_penalised_rewards(scores, logprobs.clone().requires_grad_(), ref_logprobs, mask, 0.3, estimator)
    assert not computed.requires_grad
    for row, length in enumerate(lengths):
        for t in range(mask.shape[1]):
            kl = float(ESTIMATORS[estimator](logprobs[row, t], ref_logprobs[row, t])) if t < length else 0.0
            score = float(scores[row]) if t == length - 1 else 0.0
            assert float(computed[row, t]) == pytest.approx(score - 0.3 * kl, abs=1e-12)


@pytest.mark.parametrize("variance, freedom", [("biased", 0), ("unbiased", 1)])
@pytest.mark.parametrize("keep_mean", [False, True])
def test_whitening_against_plain_python(variance, freedom, keep_mean):
    values, _, mask, lengths = draw_ragged(3)
    computed = whiten(values + 4.0, mask, variance=variance, keep_mean=keep_mean)
    expected = whitened(inside(values + 4.0, lengths), freedom, keep_mean)
    assert inside(computed, lengths) == pytest.approx(expected, abs=1e-12) and (computed[mask == 0] == 0).all()
    mean = sum(inside(computed, lengths)) / sum(lengths)
    assert mean == pytest.approx(sum(inside(values + 4.0, lengths)) / sum(lengths) if keep_mean else 0.0, abs=1e-9)


@pytest.mark.parametrize("variance", ["biased", "unbiased"])
def test_one_token_is_only_centred_and_equal_ones_do_not_explode(variance):
    one = torch.tensor([[1.0, 0.0]])
    assert whiten(torch.tensor([[4.0, 9.0]]), one, variance=variance).tolist() == [[0.0, 0.0]]
    assert whiten(torch.tensor([[4.0, 9.0]]), one, variance=variance, keep_mean=True).tolist() == [[4.0, 0.0]]
    assert whiten(torch.full((2, 3), 0.3), torch.ones(2, 3), variance=variance).abs().max() < 1e-2


def build_ragged_trajectory(**conventions):
    """An experience of draw_ragged rows, told its numbers, and the numbers of each row."""
    logprobs, ref_logprobs, mask, lengths = draw_ragged(7)
    values, scores = draw_ragged(8)[0], torch.tensor([2.0, -1.0, 0.5, 0.0, 3.0], dtype=torch.float64)
    rollout = Rollout(**rows_of(mask), ended=[True] * 5)
    with float64():
        trajectory = build_trajectory(
            GivenPolicy(logprobs, values, mask, ref_logprobs), rollout, scores, 0.3, forward_prompts=2, gamma=0.98,
            gae_lambda=0.9, **conventions)
    rewards = [
        [-0.3 * float(logprobs[r, t] - ref_logprobs[r, t]) + (float(scores[r]) if t == n - 1 else 0.0)
         for t in range(n)]
        for r, n in enumerate(lengths)
    ]
    return trajectory, rewards, [values[r, :n].tolist() for r, n in enumerate(lengths)], lengths


def flat(rows: list[list[float]]) -> list[float]:
    return [number for row in rows for number in row]


@pytest.mark.parametrize("variance, freedom", [("biased", 0), ("unbiased", 1)])
def test_a_trajectory_has_whitened_advantages_and_unwhitened_returns(variance, freedom):
    """returns = advantages before whitening + old values (A4, A5), all rows of the batch whitened as one."""
    trajectory, rewards, values, lengths = build_ragged_trajectory(variance=variance)
    raw = [brute_force(r, v, 0.98, 0.9) for r, v in zip(rewards, values, strict=True)]
    assert inside(trajectory.returns, lengths) == pytest.approx(
        [a + v for a, v in zip(flat(raw), flat(values), strict=True)], abs=1e-12
    )
    assert inside(trajectory.advantages, lengths) == pytest.approx(whitened(flat(raw), freedom), abs=1e-12)


@pytest.mark.parametrize("critic_lambda", [1.0, 0.5, 0.0])
def test_the_critic_learns_returns_of_its_own_lambda(critic_lambda):
    """Decoupled GAE (arXiv 2503.01491): the advantages keep theirs, and at 1 the returns do not depend on values."""
    trajectory, rewards, values, lengths = build_ragged_trajectory(critic_gae_lambda=critic_lambda)
    advantages, errors = ([brute_force(r, v, 0.98, lam) for r, v in zip(rewards, values, strict=True)]
                          for lam in (0.9, critic_lambda))
    assert inside(trajectory.advantages, lengths) == pytest.approx(whitened(flat(advantages), 0), abs=1e-12)
    assert inside(trajectory.returns, lengths) == pytest.approx(
        [e + v for e, v in zip(flat(errors), flat(values), strict=True)], abs=1e-12)
    observed = [sum(0.98**k * later for k, later in enumerate(row[t:])) for row in rewards for t in range(len(row))]
    assert (inside(trajectory.returns, lengths) == pytest.approx(observed, abs=1e-12)) == (critic_lambda == 1.0)
    assert Ppo().critic_gae_lambda is None


@pytest.mark.parametrize("variance, freedom", [("biased", 0), ("unbiased", 1)])
def test_whitened_rewards_keep_their_mean(variance, freedom):
    trajectory, rewards, values, lengths = build_ragged_trajectory(variance=variance, whiten_rewards=True)
    numbers = iter(whitened(flat(rewards), freedom, keep_mean=True))
    even = [[next(numbers) for _ in row] for row in rewards]
    raw = flat([brute_force(r, v, 0.98, 0.9) for r, v in zip(even, values, strict=True)])
    expected = [a + v for a, v in zip(raw, flat(values), strict=True)]
    assert inside(trajectory.returns, lengths) == pytest.approx(expected, abs=1e-12)
    assert not Ppo().whiten_rewards and Ppo().advantage_variance == "biased"
