"""Join the rollouts of several processes."""

import torch

from stages.distributed import group
from stages.generation.rollout import Rollout


def join_rollouts(prompts: list[list[int]], part: Rollout | None, own: range, with_stats: bool, top_k: int,
                  device: torch.device) -> Rollout:
    """Return the rollout of all prompts from each process's part, its rows `own`; None if it has none."""
    responses = group.gather_in_order(part.responses if part else [])
    ended = group.gather_in_order(part.ended if part else [])
    if not with_stats:
        return Rollout(prompts, responses, ended)
    columns = max(map(len, responses))
    stats = torch.zeros(3, len(prompts), columns, device=device)
    ids = torch.zeros(len(prompts), columns, top_k, dtype=torch.long, device=device) if top_k else None
    if part:
        stats[:, own, : part.logprobs.shape[1]] = torch.stack([part.logprobs, part.values, part.entropy])
        if ids is not None:
            ids[own] = -1
            ids[own, : part.logprobs.shape[1]] = part.allowed_token_ids
    return Rollout(prompts, responses, ended, *group.sum_tensor(stats),
                   None if ids is None else group.sum_tensor(ids))
