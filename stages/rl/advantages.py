"""Estimate advantages: by GAE from a critic, or by comparing the responses to one prompt (RLOO, GRPO).

An advantage estimator maps token rewards, values and mask, all [B, R], to advantages and returns [B, R]. The trainer
takes it as an argument.

Shapes: B responses, R response tokens; `mask` [B, R] is 1.0 at response tokens, 0.0 elsewhere. The k responses to a
prompt are k rows, one after the other.
"""

from collections.abc import Callable
from typing import Literal

import torch

from stages.rl.losses import masked_mean, masked_sum

GROUP_EPSILON = 1e-4  # added to a standard deviation of rewards, as in TRL
AdvantageEstimator = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def gae_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float,
    critic_gae_lambda: float | None = None, variance: Literal["biased", "unbiased"] = "biased",
    whiten_rewards: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate whitened advantages by GAE, and returns: the advantages before whitening plus the values.

    critic_gae_lambda: lambda of the advantages in the returns, where it is another one (decoupled GAE: VC-PPO, arXiv
    2503.01491). variance: see `whiten`. whiten_rewards: first divide the token rewards by their standard deviation.
    """
    if whiten_rewards:
        token_rewards = whiten(token_rewards, mask, variance=variance, keep_mean=True)
    advantages = gae(token_rewards, values, mask, gamma, gae_lambda)
    errors = advantages if critic_gae_lambda is None else gae(token_rewards, values, mask, gamma, critic_gae_lambda)
    return whiten(advantages, mask, variance=variance), errors + values


def rloo_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, responses_per_prompt: int,
    normalize: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a response's reward with the mean of the other k - 1 to its prompt (RLOO, arXiv 2402.14740, eq. 6).

    values: not read. normalize: scale the advantages of all responses to mean 0 and standard deviation 1, as an option
    of TRL's RLOOTrainer does.
    """
    rewards = torch.where(mask.bool(), token_rewards, 0.0).sum(-1)
    groups = rewards.view(-1, responses_per_prompt)
    others = (groups.sum(-1, keepdim=True) - groups) / (responses_per_prompt - 1)
    advantages = (groups - others).flatten()
    if normalize:
        advantages = (advantages - advantages.mean()) / (advantages.std() + GROUP_EPSILON)
    return _spread(advantages, mask), _spread(rewards, mask)


def grpo_advantages(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, responses_per_prompt: int,
    scale_rewards: Literal["group", "batch", "none"] = "group",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compare a response's reward with the mean of all k to its prompt (GRPO, arXiv 2402.03300, section 4.1.2).

    values: not read. scale_rewards: divide by the standard deviation of the prompt's rewards ('group'), of all rewards
    ('batch', arXiv 2508.08221), or by none (Dr. GRPO, arXiv 2503.20783).
    """
    rewards = torch.where(mask.bool(), token_rewards, 0.0).sum(-1)
    groups = rewards.view(-1, responses_per_prompt)
    advantages = groups - groups.mean(-1, keepdim=True)
    if scale_rewards != "none":
        std = groups.std(-1, keepdim=True) if scale_rewards == "group" else rewards.std()
        advantages = advantages / (std + GROUP_EPSILON)
    return _spread(advantages.flatten(), mask), _spread(rewards, mask)


def _spread(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Give each token its response's value: [B] to [B, R], 0 outside the mask."""
    return x[:, None] * mask


def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float, gae_lambda: float
) -> torch.Tensor:
    """Compute generalised advantage estimates [B, R] (arXiv 1506.02438, eq. 16).

    A_t = sum_k (gamma lambda)^k delta_{t+k} with delta_t = r_t + gamma V_{t+1} - V_t; V is 0 after the last token.
    """
    values = torch.where(mask.bool(), values, 0.0)
    advantages = torch.zeros_like(token_rewards)
    next_advantage = next_value = torch.zeros_like(token_rewards[:, 0])
    for t in reversed(range(token_rewards.shape[1])):
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = torch.where(mask[:, t].bool(), delta + gamma * gae_lambda * next_advantage, 0.0)
        advantages[:, t], next_value = next_advantage, values[:, t]
    return advantages


def whiten(
    x: torch.Tensor, mask: torch.Tensor, *, variance: Literal["biased", "unbiased"] = "biased", keep_mean: bool = False
) -> torch.Tensor:
    """Scale x [B, R] to mean 0 and standard deviation 1 over the response tokens; 0 elsewhere (eps 1e-8).

    variance: 'biased' divides by the number of tokens, 'unbiased' by one less, as TRL. keep_mean: leave the mean as it
    is, for rewards. Fewer than two tokens have no variance and are only centred.
    """
    mean, tokens = masked_mean(x, mask), mask.sum()
    whitened = x - mean
    if tokens > 1:
        freedom = tokens if variance == "biased" else tokens - 1
        whitened = whitened * torch.rsqrt(masked_sum(whitened**2, mask) / freedom + 1e-8)
    return torch.where(mask.bool(), whitened + mean if keep_mean else whitened, 0.0)
