"""KL from a policy to its reference: estimates from sampled tokens, and the controller of the penalty's weight.

Estimates of KL(p || q) for tokens drawn from p are from Schulman, "Approximating KL divergence"; `log_p` and `log_q`
are any two tensors of one shape, the result has it too, in nats. They are numbers for rewards and reports, never losses
to differentiate: the gradient of k1 is 0 on average, and that of none is the gradient of the KL (arXiv 2506.09477).
"""

import torch


def kl_k1(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """log p - log q. Unbiased, signed."""
    return log_p - log_q


def kl_k2(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2. Never negative, biased (by +25 % between normals one deviation apart)."""
    return 0.5 * (log_p - log_q) ** 2


def kl_k3(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """r - 1 - log r with r = q/p. Unbiased, never negative."""
    log_ratio = log_q - log_p
    return torch.expm1(log_ratio) - log_ratio  # expm1: r - 1 has few digits left where r is near 1


def kl_absolute(log_p: torch.Tensor, log_q: torch.Tensor) -> torch.Tensor:
    """|log p - log q|. Never negative, far too large for small KL: it grows as the KL's root."""
    return (log_p - log_q).abs()


ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3, "absolute": kl_absolute}


def adapted_beta(beta: float, kl: float, target: float, horizon: int, responses: int) -> float:
    """beta after a batch of `responses` whose mean KL (nats a response) was `kl` (arXiv 1909.08593, section 2.2)."""
    error = min(max(kl / target - 1, -0.2), 0.2)
    return beta * (1 + error * responses / horizon)


class KlController:
    """Holds beta, the weight of the KL penalty; with a target it is steered so that the KL of a response meets it.

    target_nats: KL a response; None keeps beta fixed. horizon_responses: time constant: an update multiplies beta by
    1 +- 0.2 x responses / horizon at most (arXiv 1909.08593, section 2.2). ValueError for one that is not above 0.
    """

    def __init__(self, coefficient: float, target_nats: float | None, horizon_responses: int):
        if target_nats is not None and not (target_nats > 0 and horizon_responses > 0):
            raise ValueError(
                f"kl_target_nats and kl_horizon_responses must be above 0, not {target_nats} and {horizon_responses}; "
                f"a target of null keeps kl_coefficient fixed"
            )
        self.beta, self.target, self.horizon = coefficient, target_nats, horizon_responses

    def update(self, kl: float, responses: int) -> None:
        """After a batch of `responses` whose mean KL was `kl`, nats a response; ValueError when `kl` is NaN."""
        if kl != kl:
            raise ValueError("the KL of this batch is not a number: beta would never be one again; look at the rollout")
        if self.target is not None:
            self.beta = adapted_beta(self.beta, kl, self.target, self.horizon, responses)

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps, as plain JSON numbers."""
        return {"beta": self.beta}

    def restore(self, state: dict[str, float]) -> None:
        """Take up a `state()`."""
        self.beta = state["beta"]


def kl_penalised_rewards(
    scores: torch.Tensor,
    log_p: torch.Tensor,
    log_ref: torch.Tensor,
    mask: torch.Tensor,
    beta: float,
    kl_estimator: str = "k1",
) -> torch.Tensor:
    """-beta KL at every response token, plus the row's score [B] at its last (InstructGPT eq. 2); no gradient.

    kl_estimator: a name of kl.ESTIMATORS. In a reward only k1's policy gradient is that of the KL, on average: k2 and
    absolute are biased, and k3, unbiased as a number, also pulls the reference's mass in (trl#3240).
    """
    kl = ESTIMATORS[kl_estimator](log_p.detach(), log_ref.detach())
    rewards = torch.where(mask.bool(), -beta * kl, 0.0)
    last = mask.sum(-1).long() - 1
    rewards[torch.arange(len(scores)), last] += scores
    return rewards
