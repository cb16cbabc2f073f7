"""How far two ways to compute the same log-probabilities agree: policy and reference, one batch and another, the
sampler's steps and a training-shaped forward. Before the first update they differ by rounding, or something is wrong.

A rollout has prompts, responses, and the sampler's own log_p and values ([B, R] each, or None).
Shapes: B rows, R response tokens; N tokens of all responses, row after row.
"""

from collections.abc import Callable, Iterable

import torch

from stages.rl.policy import Policy
from stages.rl.trajectory import kept_of

KL_LIMIT_NATS = 1e-4  # a response; what rounding may make of an exact 0
KEPT_SHARE = 0.005  # of the clip range: 1e-3 nats at 0.2, which no fp32 sampler comes near and no bf16 one keeps to
WARN_SHARE = 0.1  # of the clip range: more should not go to rounding
FAULT_TO_NOISE = 5  # a mean difference this many times the noise's is no rounding
NOISE_ROWS = 8  # responses whose noise is measured, at most


@torch.no_grad()
def forwarded(score: Callable, rollout, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What `score` says of the responses, each of its [B, R] as [N] on the CPU, forwarded in these groups of rows."""
    found = {}
    for rows in batches:
        index = rows.tolist()
        scored = score([rollout.prompts[i] for i in index], [rollout.responses[i] for i in index],
                       kept_of(rollout, index))
        for place, row in enumerate(index):
            found[row] = [numbers[place, : len(rollout.responses[row])].float().cpu() for numbers in scored]
    return [torch.cat(parts) for parts in zip(*(found[row] for row in sorted(found)), strict=True)]


def of_tokens(rollout, numbers: torch.Tensor) -> torch.Tensor:
    """[B, R] to [N] on the CPU."""
    rows = zip(numbers, rollout.responses, strict=True)
    return torch.cat([row[: len(response)].float().cpu() for row, response in rows])


def reference_kl(policy: Policy, rollout, log_p: torch.Tensor, batches: Iterable[torch.Tensor]) -> float:
    """KL(policy || reference), k1, nats a response; ValueError above KL_LIMIT_NATS, for a fresh adapter is the base."""
    (log_ref,) = forwarded(lambda *rows: (policy.reference(*rows),), rollout, batches)
    kl = float((log_p - log_ref).sum()) / len(rollout.responses)
    if kl != kl:
        broken = [name for name, p in policy.named_parameters() if not p.isfinite().all()]
        where = ", ".join(broken[:3]) or "some activation"
        raise ValueError(f"the KL to the reference is not a number: {where} is not finite; take sound weights")
    if not abs(kl) <= KL_LIMIT_NATS:
        raise ValueError(f"the policy starts {kl:.3g} nats a response from its reference instead of 0: start from a "
                         f"fresh adapter on the merged SFT model")
    return kl


def noise_floor(policy: Policy, rollout, microbatch_prompts: int, clip_range: float) -> tuple[float, float]:
    """How far a token's log-probability depends on the rows beside it: largest and mean spread, in nats.

    The same responses alone, in pairs and all together, in order and mixed. LLM.int8 picks its outlier columns by
    batch, so that its scores feel their neighbours; bf16 rounds by shape. ValueError beyond the clip range: updates
    would be clipped for what nobody learnt.
    """
    rows = torch.arange(min(len(rollout.prompts), microbatch_prompts, NOISE_ROWS))
    mixed = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    compositions = rows.split(1), rows.split(2), mixed.split(2), [rows], [mixed]
    seen = torch.stack([forwarded(policy, rollout, batches)[0] for batches in compositions])
    spread = seen.amax(0) - seen.amin(0)
    largest = float(spread.max())
    if not torch.expm1(spread.max()) <= clip_range:
        raise ValueError(f"a token's log-probability changes by {largest:.2g} nats with the rows beside it, more than "
                         f"clip_range ({clip_range:g}) allows a ratio: take a precision with less noise (bf16, fp32)")
    return largest, float(spread.mean())


def ratio_deviation(
    policy: Policy, rollout, log_p: torch.Tensor, microbatch_prompts: int, mean_noise: float, clip_range: float
) -> float:
    """Largest |ratio - 1| over tokens in an epoch that learns nothing; ValueError when it is a fault and not noise.

    Old: the sampler's log_p where it gave them, else `log_p` [N]; new: forwarded in microbatches of shuffled rows.
    Noise spoils single tokens; another temperature, position or mask shifts them all. So the mean decides: it may not
    be above both WARN_SHARE of the clip range and FAULT_TO_NOISE times the noise of batch compositions.
    """
    order = torch.randperm(len(rollout.prompts), generator=torch.Generator().manual_seed(0))
    new = forwarded(policy, rollout, order.split(microbatch_prompts))[0]
    old = log_p if rollout.log_p is None else of_tokens(rollout, rollout.log_p)
    deviation = torch.expm1(new - old).abs()
    mean = float(deviation.mean())
    if not mean <= max(WARN_SHARE * clip_range, FAULT_TO_NOISE * mean_noise):
        raise ValueError(
            f"before any update the ratio of new to old probabilities is {mean:.2g} away from 1 in the mean: sampling "
            f"and scoring differ in temperature, positions, mask or dropout; make them agree"
        )
    return float(deviation.max())


def rollout_differences(rollout, log_p: torch.Tensor, values: torch.Tensor) -> tuple[float | None, float | None]:
    """Largest |difference| of the sampler's own log_p and values from a training-shaped forward's [N]."""
    return tuple(None if kept is None else float((of_tokens(rollout, kept) - now).abs().max())
                 for kept, now in ((rollout.log_p, log_p), (rollout.values, values)))


def may_keep(differences: tuple[float | None, float | None], values: torch.Tensor, clip_range: float) -> bool:
    """Whether the update may take the sampler's numbers as old ones: both within KEPT_SHARE of the clip range.

    Values: relative to the largest, where that is above 1. A value head at 0 passes whatever it reads; log_p, which
    reads the same states, speaks for it.
    """
    limit = KEPT_SHARE * clip_range
    limits = limit, limit * max(1.0, float(values.abs().max()))
    return all(x is not None and x <= most for x, most in zip(differences, limits, strict=True))
