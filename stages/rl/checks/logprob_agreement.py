"""Check that different ways to compute the same log-probabilities agree before the first update.

Compared are policy and reference, batches of different composition, the forward passes of old and new
log-probabilities, and the sampler and a forward pass. They differ by rounding, or something is wrong.

Shapes: B responses (rows), R response tokens, N response tokens of all rows, one row after the other.
"""

from collections.abc import Callable, Iterable

import torch

from stages.generation.rollout import Rollout
from stages.rl.policy import Policy

KL_LIMIT_NATS = 1e-4  # per response; allows for rounding of an exact 0
REUSE_SHARE = 0.005  # of the clip range: 1e-3 nats at 0.2; samplers that round like the forward pass stay far below it
WARN_SHARE = 0.1  # of the clip range that rounding may take
FAULT_TO_NOISE = 5  # a mean difference of this many times the noise is not rounding
FAULT_TO_ROUNDING = 2  # the same for the sampler and the rounding of all layers; docs/ppo.md has what was measured
NOISE_ROWS = 8  # responses whose noise is measured, at most
CHANGED_SHARE = 64  # one in so many values of the embeddings is changed to measure rounding


@torch.no_grad()
def forward_in_batches(score: Callable, rollout: Rollout, batches: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Score the responses in these batches of rows; return each tensor of the result as [N] on the CPU."""
    scores_by_row = {}
    for rows in batches:
        index = rows.tolist()
        scores = score([rollout.prompts[i] for i in index], [rollout.responses[i] for i in index])
        for position, row in enumerate(index):
            scores_by_row[row] = [x[position, : len(rollout.responses[row])].float().cpu() for x in scores]
    in_order = [scores_by_row[row] for row in sorted(scores_by_row)]
    return [torch.cat(rows) for rows in zip(*in_order, strict=True)]


def flatten_tokens(rollout: Rollout, x: torch.Tensor) -> torch.Tensor:
    """Select the response tokens of x [B, R] as [N] on the CPU."""
    rows = zip(x, rollout.responses, strict=True)
    return torch.cat([row[: len(response)].float().cpu() for row, response in rows])


def check_reference_kl(
    policy: Policy, rollout: Rollout, logprobs: torch.Tensor, batches: Iterable[torch.Tensor]
) -> float:
    """Estimate KL(policy || reference) by k1, in nats per response; raise ValueError if it is above KL_LIMIT_NATS.

    An untrained adapter equals the base, so the KL must be 0. logprobs: [N], under the policy.
    """
    (ref_logprobs,) = forward_in_batches(lambda *rows: (policy.ref_logprobs(*rows),), rollout, batches)
    kl = float((logprobs - ref_logprobs).sum()) / len(rollout.responses)
    if kl != kl:
        broken = [name for name, p in policy.named_parameters() if not p.isfinite().all()]
        where = ", ".join(broken[:3]) or "some activation"
        raise ValueError(f"the KL to the reference is NaN: {where} is not finite; check the weights of the policy")
    if not abs(kl) <= KL_LIMIT_NATS:
        raise ValueError(f"the policy starts {kl:.3g} nats a response from its reference instead of 0: start from a "
                         f"fresh adapter on the merged SFT model")
    return kl


def measure_noise(policy: Policy, rollout: Rollout, microbatch_prompts: int, clip_range: float) -> tuple[float, float]:
    """Measure by how many nats a token's log-probability varies with the rest of its batch: largest and mean spread.

    Forwards the same responses one by one, in pairs, in order and shuffled, and all together. LLM.int8 chooses its
    outlier columns per batch; bf16 rounds by shape. Raises ValueError if the noise alone could clip an update.
    """
    rows = torch.arange(min(len(rollout.prompts), microbatch_prompts, NOISE_ROWS))
    shuffled = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    compositions = rows.split(1), rows.split(2), shuffled.split(2), [rows]
    logprobs = torch.stack([forward_in_batches(policy, rollout, batches)[0] for batches in compositions])
    spread = logprobs.amax(0) - logprobs.amin(0)
    largest = float(spread.max())
    if not torch.expm1(spread.max()) <= clip_range:
        raise ValueError(f"a token's log-probability changes by {largest:.2g} nats with the rest of its batch, more "
                         f"than clip_range ({clip_range:g}) allows a ratio: choose a precision with less noise, "
                         f"bf16 or fp32")
    return largest, float(spread.mean())


def check_ratio(old: torch.Tensor, new: torch.Tensor, mean_noise: float, clip_range: float) -> float:
    """Return the largest |ratio - 1| of a token before any update; raise ValueError if it is a fault and not noise.

    old [N]: of a forward pass, or of a sampler that agrees with one. new [N]: of a forward pass with gradients, as in
    updates. Nothing but the composition of batches may distinguish them. So the limit is on the mean: the larger of
    REUSE_SHARE of the clip range and FAULT_TO_NOISE times the mean noise.
    """
    deviation = torch.expm1(new - old).abs()
    mean = float(deviation.mean())
    if not mean <= max(REUSE_SHARE * clip_range, FAULT_TO_NOISE * mean_noise):
        raise ValueError(
            f"before any update the mean |ratio - 1| of new to old probabilities is {mean:.2g}, and batches of another "
            f"composition explain only {mean_noise:.2g}: old and new log-probabilities come from two functions")
    return float(deviation.max())


@torch.no_grad()
def measure_rounding(policy: Policy, rollout: Rollout, logprobs: torch.Tensor) -> float:
    """Measure what the rounding of all layers does to a token's probability: the mean |ratio - 1|.

    A few values of the embeddings are changed in their last bit, in the precision of the matrix products. Every later
    result is then rounded another way, as in a sampler that adds the same numbers in another order: in bf16 such a
    difference grows in a few layers to that of two implementations. No reference in a higher precision is needed, nor
    another implementation, whose faults would raise the limit. logprobs [N]: of the forward pass.
    """
    rows, generator = torch.arange(min(len(rollout.prompts), NOISE_ROWS)), torch.Generator().manual_seed(0)
    dtype = torch.float32 if policy.precision == "fp32" else torch.bfloat16

    def change(module, inputs, states: torch.Tensor) -> torch.Tensor:
        changed = torch.randint(CHANGED_SHARE, states.shape, generator=generator).to(states.device) == 0
        return (states.float() * (1 + changed * torch.finfo(dtype).eps)).to(states.dtype)

    hook = policy.causal_model.get_input_embeddings().register_forward_hook(change)
    try:
        (changed, *_) = forward_in_batches(policy, rollout, [rows])
    finally:
        hook.remove()
    return float(torch.expm1(changed - logprobs[: len(changed)]).abs().mean())


def check_sampler(rollout: Rollout, logprobs: torch.Tensor, rounding: float, clip_range: float) -> float:
    """Return the mean |ratio - 1| of the forward pass's probabilities to the sampler's; ValueError if it is a fault.

    Rounding affects single tokens, and by how much depends on precision and depth; another temperature, position or
    mask, or older weights, shift all of them. So the limit is the larger of REUSE_SHARE of the clip range and
    FAULT_TO_ROUNDING times `rounding`, of `measure_rounding`.
    """
    mean = float(torch.expm1(logprobs - flatten_tokens(rollout, rollout.logprobs)).abs().mean())
    if not mean <= max(REUSE_SHARE * clip_range, FAULT_TO_ROUNDING * rounding):
        raise ValueError(
            f"before any update the mean |ratio - 1| of the forward pass's probabilities to the sampler's is "
            f"{mean:.2g}, and rounding explains {rounding:.2g}: sampling and scoring differ in temperature, positions, "
            f"mask, dropout or weights; make them agree")
    return mean


def compare_with_rollout(rollout: Rollout, logprobs: torch.Tensor, values: torch.Tensor) -> tuple[float | None, ...]:
    """Return the largest differences of the sampler's log-probabilities and values from the forward pass's [N]."""
    pairs = (rollout.logprobs, logprobs), (rollout.values, values)
    return tuple(None if sampled is None else float((flatten_tokens(rollout, sampled) - forwarded).abs().max())
                 for sampled, forwarded in pairs)


def can_reuse_rollout(differences: tuple[float | None, ...], values: torch.Tensor, clip_range: float) -> bool:
    """Return whether both differences are within REUSE_SHARE of the clip range.

    Then the update may use the sampler's numbers as old ones. Values: relative to the largest one if that is above 1. A
    value head at 0 always agrees; the log-probabilities, from the same hidden states, decide for it.
    """
    limit = REUSE_SHARE * clip_range
    limits = limit, limit * max(1.0, float(values.abs().max()))
    return all(x is not None and x <= most for x, most in zip(differences, limits, strict=True))
