"""Rewards, GAE, whitening and the controller against plain loops in float64 (CORRECTNESS A1-A5, K6, P13)."""

import random

import pytest
import torch

from stages.learning.advantages import adapted_beta, gae, token_rewards, whiten


def ragged(seed: int, rows: int = 5, columns: int = 9):
    generator = torch.Generator().manual_seed(seed)
    lengths = [random.Random(seed * 10 + i).randint(1, columns) for i in range(rows)]
    mask = (torch.arange(columns) < torch.tensor(lengths)[:, None]).double()
    draw = lambda: torch.randn(rows, columns, generator=generator, dtype=torch.float64)  # noqa: E731
    return draw(), draw(), mask, lengths


@pytest.mark.parametrize("gamma, lam", [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_equals_the_brute_force_sum(gamma, lam):
    rewards, values, mask, lengths = ragged(1)
    found = gae(rewards, values, mask, gamma, lam)
    for row, length in enumerate(lengths):
        r, v = rewards[row].tolist()[:length], values[row].tolist()[:length] + [0.0]
        for t in range(length):
            expected = sum((gamma * lam) ** (k - t) * (r[k] + gamma * v[k + 1] - v[k]) for k in range(t, length))
            assert float(found[row, t]) == pytest.approx(expected, abs=1e-12)
        assert (found[row, length:] == 0).all()


def test_a_return_is_the_score_less_later_penalties():
    """gamma = lambda = 1 and zero values: by hand (CORRECTNESS failure 15)."""
    log_p, log_ref, mask, lengths = ragged(2)
    scores = torch.arange(5, dtype=torch.float64)
    returns = gae(token_rewards(scores, log_p, log_ref, mask, 0.3), torch.zeros_like(mask), mask, 1.0, 1.0)
    for row, length in enumerate(lengths):
        for t in range(length):
            later = sum(0.3 * float(log_p[row, k] - log_ref[row, k]) for k in range(t, length))
            assert float(returns[row, t]) == pytest.approx(float(scores[row]) - later, abs=1e-12)


def test_the_score_stands_at_the_last_response_token_and_nowhere_else():
    zero = torch.zeros(2, 4)
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]])
    assert token_rewards(torch.tensor([5.0, -7.0]), zero, zero, mask, 0.1).tolist() == [[0, 0, 5, 0], [-7, 0, 0, 0]]


def test_whitening_against_plain_python_and_pads_change_nothing():
    values, _, mask, lengths = ragged(3)
    inside = [float(values[r, t]) for r, n in enumerate(lengths) for t in range(n)]
    mean = sum(inside) / len(inside)
    sd = (sum((x - mean) ** 2 for x in inside) / len(inside) + 1e-8) ** 0.5
    found = whiten(values, mask)
    assert [float(found[r, t]) for r, n in enumerate(lengths) for t in range(n)] == pytest.approx(
        [(x - mean) / sd for x in inside]
    )
    wider = whiten(torch.nn.functional.pad(values, (0, 3), value=9.0), torch.nn.functional.pad(mask, (0, 3)))
    assert torch.allclose(wider[:, :-3], found, atol=1e-12) and (wider[:, -3:] == 0).all()


def test_one_token_is_only_centred():
    assert whiten(torch.tensor([[4.0, 9.0]]), torch.tensor([[1.0, 0.0]])).tolist() == [[0.0, 0.0]]


def test_beta_is_constant_at_the_target_and_moves_no_more_than_its_horizon_allows():
    assert adapted_beta(0.2, 6.0, 6.0, 10_000, 64) == 0.2
    assert adapted_beta(0.2, 1e9, 6.0, 10_000, 64) == pytest.approx(0.2 * (1 + 0.2 * 64 / 10_000))
    assert adapted_beta(0.2, -5.0, 6.0, 10_000, 64) == pytest.approx(0.2 * (1 - 0.2 * 64 / 10_000))
