"""TODO docstring."""

import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.generation.sampling_params import SamplingParams, cut_at_stop
from stages.rl.policy import Policy


def collect_rollout(
    policy: Policy, prompts: list[list[int]], how: SamplingParams, generator: torch.Generator, forward_prompts: int
) -> Rollout:
    """A rollout with its log-probabilities, values and entropies; forward_prompts: see Policy.with_values."""
    most: int | list[int] = how.max_response_tokens
    if how.response_length == "sampled":
        span = (how.min_response_tokens, how.max_response_tokens + 1)
        most = torch.randint(*span, (len(prompts),), generator=generator).tolist()
    with policy.merged() as model:
        rollout = sample(
            model, prompts, max_new_tokens=most, temperature=how.temperature, generator=generator,
            stop_ids=() if how.response_length == "fixed" else how.stop_ids,
            precision=policy.precision, value_fn=policy.values_of, top_k=how.top_k, top_p=how.top_p,
        )
    rollout = cut_at_stop(rollout, how.stop_ids) if how.response_length == "fixed" else rollout
    return policy.with_values(rollout, forward_prompts)
