"""RLOO's and GRPO's advantages against plain Python loops, and on a bandit with a known optimum."""

import os
from dataclasses import replace
from functools import partial
from statistics import mean, stdev

import pytest
import torch

from stages.rewards.kl import kl_penalised_rewards
from stages.rl.advantages import GROUP_EPSILON, grpo_advantages, rloo_advantages
from stages.rl.losses import kl_in_loss, probability_ratio, sum_means
from stages.rl.policy_gradient_trainer import update_policy
from stages.rl.trajectory import Trajectory, score_rollout
from tests.rl import test_ppo_learns_bandit as bandit

LENGTHS = [3, 1, 4, 2, 2, 5]
K = 3


def draw_rows() -> tuple[torch.Tensor, torch.Tensor]:
    """Return token rewards [6, 5], with noise after each end, and their mask."""
    mask = (torch.arange(5) < torch.tensor(LENGTHS)[:, None]).double()
    return torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), mask


def sum_rewards(token_rewards: torch.Tensor) -> list[float]:
    return [sum(token_rewards[row, :length].tolist()) for row, length in enumerate(LENGTHS)]


def check(actual: torch.Tensor, expected: list[float], mask: torch.Tensor) -> None:
    assert torch.allclose(actual, torch.tensor(expected, dtype=torch.float64)[:, None] * mask, atol=1e-12)


@pytest.mark.parametrize("normalize", [False, True])
def test_rloo_against_plain_python(normalize):
    token_rewards, mask = draw_rows()
    rewards, expected = sum_rewards(token_rewards), []
    for row in range(6):
        others = [rewards[other] for other in range(6) if other // K == row // K and other != row]
        expected.append(rewards[row] - sum(others) / len(others))
    if normalize:
        center, spread = mean(expected), stdev(expected)
        expected = [(advantage - center) / (spread + GROUP_EPSILON) for advantage in expected]
    actual, returns = rloo_advantages(
        token_rewards, torch.full_like(mask, 9.0), mask, responses_per_prompt=K, normalize=normalize)
    check(actual, expected, mask)
    check(returns, rewards, mask)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_against_plain_python(scale):
    token_rewards, mask = draw_rows()
    rewards, expected = sum_rewards(token_rewards), []
    for row in range(6):
        group = [rewards[other] for other in range(6) if other // K == row // K]
        spread = {"group": stdev(group), "batch": stdev(rewards), "none": None}[scale]
        expected.append((rewards[row] - mean(group)) / (1.0 if spread is None else spread + GROUP_EPSILON))
    actual, returns = grpo_advantages(
        token_rewards, torch.full_like(mask, 9.0), mask, responses_per_prompt=K, scale_rewards=scale)
    check(actual, expected, mask)
    check(returns, rewards, mask)


def test_ratios_and_means_against_plain_python():
    x, mask = draw_rows()
    new, old = x, x.flip(0)
    by_token, by_sequence = (probability_ratio(new, old, mask, level) for level in ("token", "sequence"))
    differences = (new - old).tolist()
    for row, length in enumerate(LENGTHS):
        total = sum(differences[row][:length])
        for column in range(5):
            inside = column < length
            expected = (differences[row][column], total) if inside else (0.0, 0.0)
            assert float(by_token[row, column].log()) == pytest.approx(expected[0], abs=1e-12)
            assert float(by_sequence[row, column].log()) == pytest.approx(expected[1], abs=1e-12)
    rows = [x[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    assert float(sum_means(x, mask, "token")) == pytest.approx(sum(map(sum, rows)))
    assert float(sum_means(x, mask, "sequence")) == pytest.approx(sum(sum(row) / len(row) for row in rows))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_the_kl_in_the_loss_has_the_gradient_of_each_tokens_kl(level):
    """Of all responses of two tokens, weighted by their probabilities; what precedes a token is taken as fixed."""
    logits, reference = (torch.randn(3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
                         for seed in range(2))  # row 0: of the first token; 1 + first: of the second
    logits.requires_grad_()
    new, ref = logits.log_softmax(-1), reference.log_softmax(-1)
    firsts, seconds = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    mask = torch.ones(4, 2, dtype=torch.float64)
    tokens, ref_tokens = (torch.stack([table[0, firsts], table[1 + firsts, seconds]], 1) for table in (new, ref))
    kl = kl_in_loss(tokens, ref_tokens, tokens.detach(), mask, level, importance_weight=True)
    actual = (kl.sum(-1) if level == "token" else kl.mean(-1)) @ tokens.detach().sum(-1).exp()
    exact = ((new.exp() * (new - ref)).sum(-1) * torch.cat([torch.ones(1), new[0].detach().exp()])).sum()
    assert actual.item() == pytest.approx(exact.item(), abs=1e-12)
    gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (actual, exact)]
    assert torch.allclose(*gradients, atol=1e-12)


# GRPO's mean over a group has the response itself in it: on average its advantage is (k - 1) / k of the other one, and
# its KL coefficient must be, too, for the same optimum.
GROUP = 8
SEEDS = range(int(os.environ.get("BANDIT_SEEDS", "2")))  # BANDIT_SEEDS=10 runs the ten of the goal
METHODS = {
    "rloo": (partial(rloo_advantages, responses_per_prompt=GROUP), "reward",
             {"loss_mean": "sequence"}, 0.0),
    "grpo": (partial(grpo_advantages, responses_per_prompt=GROUP, scale_rewards="none"), "loss",
             {"loss_mean": "sequence", "kl_importance_weight": True}, bandit.BETA * (GROUP - 1) / GROUP),
}


@pytest.mark.parametrize(("method", "ratio_level", "seed"), [
    *(("rloo", "sequence", seed) for seed in SEEDS), *(("grpo", "token", seed) for seed in SEEDS),
    ("grpo", "sequence", 0)])
def test_they_go_95_percent_of_the_way_to_the_optimum(method, ratio_level, seed):
    """As the bandit's PPO test, with half its passes over a rollout."""
    estimate, kl_in, loss, kl_coefficient = METHODS[method]
    problem = bandit.Bandit(seed)
    settings = replace(bandit.UPDATE, epochs=2, value_coefficient=0.0, ratio_level=ratio_level, **loss)
    policy = problem.policy
    optimizer = torch.optim.Adam(policy.policy_parameters(), lr=bandit.LEARNING_RATE, eps=1e-5)
    for rollout, rewards, generator in problem.iterations(optimizer, seed):
        scores = score_rollout(policy, rollout, bandit.RESPONSES)
        token_rewards = kl_penalised_rewards(rewards, scores.logprobs, scores.ref_logprobs, scores.mask,
                                             bandit.BETA if kl_in == "reward" else 0.0)
        trajectory = Trajectory.from_scores(rollout, scores, *estimate(token_rewards, scores.values, scores.mask))
        update_policy(policy, optimizer, trajectory, settings, generator, kl_coefficient)
    problem.check(f"{method}, seed {seed}")
