"""Collect rollouts: sample responses from the policy with the statistics that PPO needs."""

import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.generation.sampling_params import SamplingParams, cut_at_stop
from stages.rl.policy import Policy


def collect_rollout(
    policy: Policy, prompts: list[list[int]], sampling: SamplingParams, generator: torch.Generator,
    forward_prompts: int
) -> Rollout:
    """Sample one response per prompt, with log-probabilities, values and entropies of its tokens under the policy.

    forward_prompts: rows per forward pass of a separate value adapter.
    """
    limits = [sampling.max_response_tokens] * len(prompts)
    if sampling.response_length == "sampled":
        span = (sampling.min_response_tokens, sampling.max_response_tokens + 1)
        limits = torch.randint(*span, (len(prompts),), generator=generator).tolist()
    fixed = sampling.response_length == "fixed"
    with policy.merge_adapter() as model:
        rollout = sample(
            model, prompts, max_new_tokens=limits, temperature=sampling.temperature,
            stop_ids=() if fixed else sampling.stop_ids, precision=policy.precision, top_k=sampling.top_k,
            top_p=sampling.top_p, share_prefixes=policy.share_prompts, value_fn=policy.values_from_hidden,
            generator=generator)
    rollout = cut_at_stop(rollout, sampling.stop_ids) if fixed else rollout
    return policy.fill_values(rollout, forward_prompts)
