"""How responses are drawn in a run: how long they may be, and what ends them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from stages.generation.rollout import Rollout


@dataclass(frozen=True)
class SamplingParams:
    """As in the recipe's section ppo.

    response_length: 'until_stop': to a stop id or max_response_tokens; 'sampled': the same, but each response has a
    most of its own, uniform in [min_response_tokens, max_response_tokens]; 'fixed': all tokens are drawn, and what
    stands after the first stop id is cut off ("The N Implementation Details of RLHF with PPO").
    """

    temperature: float
    stop_ids: Sequence[int]
    response_length: Literal["until_stop", "sampled", "fixed"]
    min_response_tokens: int
    max_response_tokens: int
    top_k: int = 0
    top_p: float = 1.0


def cut_at_stop(rollout: Rollout, stop_ids: Sequence[int]) -> Rollout:
    """What stands after each response's first stop id is cut off; the stop id stays."""
    responses = [_until_stop(response, set(stop_ids)) for response in rollout.responses]
    columns = max(map(len, responses))
    inside = torch.arange(columns) < torch.tensor([[len(response)] for response in responses])
    numbers = {name: getattr(rollout, name) for name in ("log_p", "values", "entropy")}
    return replace(
        rollout,
        responses=responses,
        ended=[response[-1] in stop_ids for response in responses],
        **{name: x if x is None else x[:, :columns] * inside.to(x) for name, x in numbers.items()},
        kept=None if rollout.kept is None else rollout.kept[:, :columns],
    )


def _until_stop(response: list[int], stop_ids: set[int]) -> list[int]:
    end = next((place for place, token in enumerate(response) if token in stop_ids), len(response) - 1)
    return response[: end + 1]
