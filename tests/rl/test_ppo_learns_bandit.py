"""PPO on a bandit over first tokens: known rewards, a KL penalty, an optimum in closed form (issue 4, Correctness).

Each of 16 first tokens has a fixed reward r, the second token is worth nothing. E[r] - beta KL(policy || reference) is
largest where the first token follows ref exp(r / beta) and the second the reference: beta log sum ref exp(r / beta).
The reward comes after the second token: it must find its way back to the first. No sampling in what is judged: the
objective is summed over all first tokens from the policy's own softmax.

Three seeds are run. The issue's goal names ten: BANDIT_SEEDS=10 python -m pytest tests/rl/test_ppo_learns_bandit.py
"""

import os
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.modeling import lora
from stages.rl.policy import Policy
from stages.rl.policy_gradient_trainer import update_policy
from tests.helpers.trajectories import build_trajectory
from tests.rl import test_policy

# As many arms as tokens, and fewer than the model is wide: with 320 tokens and a width of 32 no hidden state gives the
# optimum's logits (gradient ascent on the exact objective ends at 20 to 90 %; here at 99 % or above).
ARMS, WIDTH, PROMPT, BETA = 16, 64, [1, 2, 3], 0.5
SEEDS = range(int(os.environ.get("BANDIT_SEEDS", "3")))
ITERATIONS, RESPONSES, LEARNING_RATE = 250, 128, 0.01  # after 150 a seed in ten or twenty is at 0.94 to 0.96
GOAL, CHECK_EVERY = 0.95, 10  # share of the way to the optimum, where training ends
UPDATE = replace(
    test_policy.UPDATE, epochs=4, minibatch_prompts=RESPONSES, microbatch_prompts=RESPONSES
)


def make_policy(seed):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=ARMS, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, initializer_range=0.2, tie_word_embeddings=False, pad_token_id=None,
    )
    model = LlamaForCausalLM(config).eval()
    return Policy(
        lora.add_lora(model, r=4, alpha=8, dropout=0.0, target_modules=(), precision="fp32"), 1.0, "fp32"
    )


@torch.no_grad()
def token_logprobs(policy):
    """Log-probabilities, float64, of the first token [16], and of the second after each first one [16, 16]."""
    sequences = torch.tensor([[*PROMPT, arm] for arm in range(ARMS)])
    logprobs = torch.log_softmax(policy.model(sequences).logits.double(), -1)
    return logprobs[0, len(PROMPT) - 1], logprobs[:, len(PROMPT)]


def objective(shares, reference, rewards):
    """E[r] - beta KL(policy || reference) over all responses of two tokens."""
    first, second = shares
    second_kl = (second.exp() * (second - reference[1])).sum(-1)
    return float((first.exp() * (rewards - BETA * (first - reference[0] + second_kl))).sum())


class Bandit:
    """A policy that has learnt nothing yet, and the rewards of its first tokens."""

    def __init__(self, seed: int):
        self.policy = make_policy(seed)
        self.rewards = torch.randn(ARMS, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        self.reference = token_logprobs(self.policy)
        self.start = self.reached()
        self.optimum = BETA * float(torch.logsumexp(self.reference[0] + self.rewards / BETA, 0))

    def reached(self) -> float:
        """Compute the objective of the present policy."""
        return objective(token_logprobs(self.policy), self.reference, self.rewards)

    def share(self) -> float:
        """Return how much of the way from the start to the optimum the policy has gone."""
        return (self.reached() - self.start) / (self.optimum - self.start)

    def iterations(
        self, optimizer: torch.optim.Optimizer, seed: int
    ) -> Iterator[tuple[Rollout, torch.Tensor, torch.Generator]]:
        """Yield rollouts, their rewards and generators, at falling learning rates, until the policy is good enough."""
        for iteration in range(ITERATIONS):
            if iteration % CHECK_EVERY == 0 and self.share() >= GOAL:
                return
            optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - iteration / ITERATIONS)
            generator = torch.Generator().manual_seed(1000 * seed + iteration)
            rollout = sample(self.policy.model, [PROMPT] * RESPONSES, max_new_tokens=2, temperature=1.0, stop_ids=(),
                             generator=generator)
            yield rollout, torch.stack([self.rewards[response[0]] for response in rollout.responses]).float(), generator

    def check(self, name: str) -> None:
        """Check that the policy is near the optimum, and not above it."""
        print(f"{name}: start {self.start:.3f}, reached {self.reached():.3f}, optimum {self.optimum:.3f}")
        assert self.reached() <= self.optimum + 1e-9 and self.share() >= GOAL


@pytest.mark.parametrize("seed", SEEDS)
def test_ppo_goes_95_percent_of_the_way_to_the_optimum(seed):
    bandit = Bandit(seed)
    optimizer = torch.optim.Adam(bandit.policy.trainable_parameters().values(), lr=LEARNING_RATE, eps=1e-5)
    for rollout, scores, generator in bandit.iterations(optimizer, seed):
        trajectory = build_trajectory(bandit.policy, rollout, scores, BETA, forward_prompts=RESPONSES)
        update_policy(bandit.policy, optimizer, trajectory, UPDATE, generator)
    bandit.check(f"seed {seed}")


def test_the_optimum_is_that_of_the_closed_form():
    """The objective at ref exp(r / beta) is beta log sum ref exp(r / beta), and lower wherever one looks around it."""
    generator = torch.Generator().manual_seed(0)
    first, second, rewards = (torch.randn(*shape, generator=generator, dtype=torch.float64)
                              for shape in ((ARMS,), (ARMS, ARMS), (ARMS,)))
    reference = torch.log_softmax(first, -1), torch.log_softmax(second, -1)
    best = torch.log_softmax(reference[0] + rewards / BETA, -1)
    optimum = BETA * float(torch.logsumexp(reference[0] + rewards / BETA, 0))
    assert objective((best, reference[1]), reference, rewards) == pytest.approx(optimum, abs=1e-12)
    for _ in range(20):
        moved = [torch.log_softmax(x + 0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64), -1)
                 for x in (best, reference[1])]
        assert objective(moved, reference, rewards) < optimum
