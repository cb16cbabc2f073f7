"""KL divergence from the policy to its reference: estimators, the penalised rewards, and the adaptive coefficient.

The estimators of KL(p || q) from tokens sampled from p are those of Schulman's note "Approximating KL divergence"
(2020). They map log-probabilities under p and under q, of one shape, to nats of that shape. They serve rewards and
metrics and are not losses: the gradient of k1 is 0 on average, and no estimator's gradient is that of the KL
(arXiv 2506.09477).
"""

import torch


def kl_k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute log p - log q: unbiased, signed."""
    return logprobs - ref_logprobs


def kl_k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute (log p - log q)^2 / 2: never negative, biased (+25 % between normals one standard deviation apart)."""
    return 0.5 * (logprobs - ref_logprobs) ** 2


def kl_k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute r - 1 - log r with r = q / p: unbiased, never negative."""
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio  # exp(x) - 1 cancels most digits near 0


def kl_absolute(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Compute |log p - log q|: never negative, and far too large for a small KL, as it grows with the KL's root."""
    return (logprobs - ref_logprobs).abs()


ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "absolute": kl_absolute}


def kl_penalised_rewards(
    rewards: torch.Tensor, logprobs: torch.Tensor, ref_logprobs: torch.Tensor, mask: torch.Tensor,
    kl_coefficient: float, kl_estimator: str = "k1",
) -> torch.Tensor:
    """Compute token rewards [B, R] without gradient: the weighted KL, negative, plus the reward [B] at the last token.

    InstructGPT (arXiv 2203.02155), eq. 2. logprobs, ref_logprobs, mask: [B, R]. kl_estimator: a key of ESTIMATORS.

    As part of a reward, only k1 has the KL's policy gradient, on average: k2 and absolute are biased, and k3, unbiased
    as a number, also pulls the reference's probability mass in (trl#3240).
    """
    kl = ESTIMATORS[kl_estimator](logprobs.detach(), ref_logprobs.detach())
    token_rewards = torch.where(mask.bool(), -kl_coefficient * kl, 0.0)
    last = mask.sum(-1).long() - 1
    token_rewards[torch.arange(len(rewards)), last] += rewards
    return token_rewards


def adapt_kl_coefficient(kl_coefficient: float, kl: float, target: float, horizon: int, responses: int) -> float:
    """Adapt the coefficient to a batch of `responses` with mean KL `kl`, in nats per response (arXiv 1909.08593, 2.2).
    """
    error = min(max(kl / target - 1, -0.2), 0.2)
    return kl_coefficient * (1 + error * responses / horizon)


class KlController:
    """The KL coefficient (beta in the history): fixed, or adapted so that the KL per response reaches a target.

    target_nats: KL per response; None keeps it fixed. horizon_responses: time constant; an update multiplies it by
    1 +- 0.2 * responses / horizon at most (arXiv 1909.08593, section 2.2). Raises ValueError unless both are above 0.
    """

    def __init__(self, kl_coefficient: float, target_nats: float | None, horizon_responses: int):
        if target_nats is not None and not (target_nats > 0 and horizon_responses > 0):
            raise ValueError(
                f"kl_target_nats and kl_horizon_responses must be above 0, not {target_nats} and {horizon_responses}; "
                f"a target of null keeps kl_coefficient fixed"
            )
        self.kl_coefficient, self.target_nats, self.horizon_responses = kl_coefficient, target_nats, horizon_responses

    def update(self, kl: float, responses: int) -> None:
        """Adapt to a batch of `responses` with mean KL `kl`, nats per response; raise ValueError if it is NaN."""
        if kl != kl:
            raise ValueError("KL is NaN for this batch, and would make beta NaN for good: inspect the rollout's "
                             "log-probabilities")
        if self.target_nats is not None:
            self.kl_coefficient = adapt_kl_coefficient(
                self.kl_coefficient, kl, self.target_nats, self.horizon_responses, responses)

    def state(self) -> dict[str, float]:
        """Return the state for a checkpoint, as JSON numbers."""
        return {"beta": self.kl_coefficient}

    def restore(self, state: dict[str, float]) -> None:
        """Continue from a `state()`."""
        self.kl_coefficient = state["beta"]
