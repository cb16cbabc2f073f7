"""Collect rollouts: sample responses from the policy with the statistics that PPO needs."""

import torch

from stages.generation.engines.own import OwnEngine
from stages.generation.engines.protocol import SamplingEngine, SamplingRequest
from stages.generation.rollout import Rollout
from stages.generation.sampling_params import SamplingParams, cut_at_stop
from stages.rl.policy import Policy
from stages.rl.trajectory import fill_policy_scores


def collect_rollout(
    policy: Policy, prompts: list[list[int]], sampling: SamplingParams, generator: torch.Generator,
    forward_prompts: int, engine: SamplingEngine | None = None
) -> Rollout:
    """Sample one response per prompt, with log-probabilities, values and entropies of its tokens under the policy.

    forward_prompts: rows per forward pass of a separate value adapter, and of the policy where another engine samples.
    engine: None: this project's sampler.
    """
    limits = [sampling.max_response_tokens] * len(prompts)
    if sampling.response_length == "sampled":
        span = (sampling.min_response_tokens, sampling.max_response_tokens + 1)
        limits = torch.randint(*span, (len(prompts),), generator=generator).tolist()
    fixed = sampling.response_length == "fixed"
    request = SamplingRequest(
        prompts, limits, sampling.temperature, stop_ids=() if fixed else sampling.stop_ids, precision=policy.precision,
        top_k=sampling.top_k, top_p=sampling.top_p, share_prefixes=policy.share_prompts,
        value_fn=policy.values_from_hidden)
    with policy.merge_adapter() as model:
        rollout = (engine or OwnEngine()).sample(model, request, generator)
    rollout = cut_at_stop(rollout, sampling.stop_ids) if fixed else rollout
    if rollout.sampler_logprobs is None:
        return policy.fill_values(rollout, forward_prompts)
    return fill_policy_scores(policy, rollout, forward_prompts)
