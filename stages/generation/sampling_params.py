"""Settings of sampling in PPO: temperature, filters, response lengths and stop ids."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from stages.generation.rollout import Rollout


@dataclass(frozen=True)
class SamplingParams:
    """Sampling settings, named as in the recipe's section `ppo`.

    response_length: 'until_stop' samples up to a stop id or max_response_tokens. 'sampled' does the same with a limit
    for each response, uniform in [min_response_tokens, max_response_tokens]. 'fixed' samples max_response_tokens and
    cuts each response after its first stop id ("The N Implementation Details of RLHF with PPO").
    """

    temperature: float
    stop_ids: Sequence[int]
    response_length: Literal["until_stop", "sampled", "fixed"]
    min_response_tokens: int
    max_response_tokens: int
    top_k: int
    top_p: float


def cut_at_stop(rollout: Rollout, stop_ids: Sequence[int]) -> Rollout:
    """Cut each response after its first stop id."""
    responses = [_cut(response, set(stop_ids)) for response in rollout.responses]
    columns = max(map(len, responses))
    inside = torch.arange(columns) < torch.tensor([[len(response)] for response in responses])
    stats = {name: getattr(rollout, name) for name in ("logprobs", "values", "entropy")}
    ids = rollout.allowed_token_ids
    return replace(
        rollout,
        responses=responses,
        ended=[response[-1] in stop_ids for response in responses],
        **{name: x if x is None else x[:, :columns] * inside.to(x) for name, x in stats.items()},
        allowed_token_ids=None if ids is None else ids[:, :columns],
    )


def _cut(response: list[int], stop_ids: set[int]) -> list[int]:
    end = next((i for i, token in enumerate(response) if token in stop_ids), len(response) - 1)
    return response[: end + 1]
