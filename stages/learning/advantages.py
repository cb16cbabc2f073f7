"""From scores to advantages. Shapes: [B, R] rows by response tokens; `mask` is 1.0 at response tokens."""

import torch

from stages.learning.losses import masked_mean


def token_rewards(
    scores: torch.Tensor, log_p: torch.Tensor, log_ref: torch.Tensor, mask: torch.Tensor, beta: float
) -> torch.Tensor:
    """-beta (log p - log p_ref) at every response token, plus the row's score [B] at its last (InstructGPT eq. 2)."""
    rewards = torch.where(mask.bool(), -beta * (log_p - log_ref), 0.0)
    last = mask.sum(-1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards


def gae(rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, lam: float) -> torch.Tensor:
    """Generalised advantage estimates [B, R]; the value after the last token is 0 (arXiv 1506.02438, eq. 16)."""
    values = torch.where(mask.bool(), values, 0.0)
    advantages = torch.zeros_like(rewards)
    following = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        next_value = values[:, t + 1] if t + 1 < rewards.shape[1] else torch.zeros_like(following)
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        following = (delta + gamma * lam * following) * mask[:, t]
        advantages[:, t] = following
    return advantages


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over the response tokens (biased variance, eps 1e-8); 0 elsewhere.

    Fewer than two tokens have no spread: they are only centred.
    """
    centred = values - masked_mean(values, mask)
    scale = torch.rsqrt(masked_mean(centred**2, mask) + 1e-8) if mask.sum() > 1 else 1.0
    return torch.where(mask.bool(), centred * scale, 0.0)


def adapted_beta(beta: float, kl: float, target: float, horizon: int, responses: int) -> float:
    """beta after a batch of `responses` whose mean KL (nats a response) was `kl` (arXiv 1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * responses / horizon)
