"""Collect rollouts: sample responses from the policy with the statistics that PPO needs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from stages.generation.rollout import Rollout
from stages.generation.sampler import sample
from stages.rl.policy import Policy


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings, named as in the recipe's section `ppo`.

    response_length: 'until_stop' samples up to a stop id or max_response_tokens. 'sampled' does the same with a limit
    for each response, uniform in [min_response_tokens, max_response_tokens]. rollout_units: `units` of `sample`.
    """

    temperature: float
    stop_ids: Sequence[int]
    response_length: Literal["until_stop", "sampled"]
    min_response_tokens: int
    max_response_tokens: int
    rollout_units: int = 1


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
    with policy.merge_adapter() as model:
        rollout = sample(
            model, prompts, max_new_tokens=limits, temperature=sampling.temperature, stop_ids=sampling.stop_ids,
            precision=policy.precision, share_prefixes=policy.share_prompts, value_fn=policy.values_from_hidden,
            generator=generator, units=sampling.rollout_units)
    return policy.fill_values(rollout, forward_prompts)
