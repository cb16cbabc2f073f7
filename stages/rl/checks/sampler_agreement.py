"""Check that an engine outside of this project samples from the policy: compare log-probabilities with the policy's.

Old log-probabilities are the policy's in any case. If the engine's are others, the responses come from another
distribution: stale weights, another temperature, a filter, another attention.
"""

from collections.abc import Callable

from stages.generation.rollout import Rollout

# Mean |difference| of a token's log-probabilities, in nats, that is rounding.
LIMITS_NATS = {"fp32": 1e-3, "mixed": 0.05, "bf16": 0.05, "int8": 0.1, "nf4": 0.1}


def difference_limit(limit_nats: float | None, precision: str) -> float:
    """Return the limit of the mean difference: the given one, or that of the precision."""
    return LIMITS_NATS[precision] if limit_nats is None else limit_nats


def sampler_difference(rollout: Rollout) -> dict[str, float]:
    """Compute mean and maximum of |sampler's - policy's log-probability| over the tokens, in nats, by metric name.

    Empty for a rollout of this project's sampler.
    """
    if rollout.sampler_logprobs is None:
        return {}
    difference = (rollout.sampler_logprobs - rollout.logprobs).abs()
    return {"sampler_logprob_difference": float(difference.sum()) / sum(map(len, rollout.responses)),
            "sampler_logprob_difference_max": float(difference.max())}


def check_sampler(engine: str, rollout: Rollout, precision: str, limit_nats: float, say: Callable[[str], None]) -> None:
    """Print the difference of an engine's first rollout; raise ValueError if its mean is above the limit."""
    if rollout.sampler_logprobs is None:
        return
    mean, largest = sampler_difference(rollout).values()
    difference = f"differ from the policy's by {mean:.2g} nats a token in the mean and {largest:.2g} at most"
    if not mean <= limit_nats:
        raise ValueError(
            f"the log-probabilities of sampling_engine {engine} {difference}; {limit_nats:g} in the mean is the limit "
            f"in {precision}: it samples from another distribution; set sampling_engine to own")
    say(f"check  sampling engine {engine}  its log-probabilities {difference}  (limit {limit_nats:g} in the mean)  ok")
