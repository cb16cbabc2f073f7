"""One PPO iteration on given rollouts: experience, then several epochs of clipped minibatch updates.

PPO as in "Fine-Tuning Language Models from Human Preferences" (arXiv 1909.08593) with the details of "The N
Implementation Details of RLHF with PPO". Shapes: [B, R] rows by response tokens.
"""

from dataclasses import replace
from functools import partial

import torch

from stages.rl import losses
from stages.rl.kl import kl_k3
from stages.rl.policy import Policy
from stages.rl.trajectory import Trajectory, Update, kept_of
from stages.training.memory import find_executable_batch_size
from stages.training.optimizers import InBackward, gradient_norm

STATISTICS = ("policy_loss", "value_loss", "ratio", "clip_fraction", "update_kl")


def update(
    policy: Policy, optimizer: torch.optim.Optimizer, seen: Trajectory, update: Update, generator: torch.Generator
) -> dict:
    """All epochs over one experience: every response once an epoch, in a fresh order. Returns statistics.

    Stops early when the policy has moved `update_kl_limit` nats a token from the rollout's; skips, and counts, a
    minibatch whose mean ratio is above `max_ratio` or whose gradient is not finite (`skips`: which, in order). Out of
    memory, it goes on with smaller microbatches: `microbatch_prompts` says how large they are at the end.
    """
    log: list[dict[str, float]] = []
    for _ in range(update.epochs):
        order = torch.randperm(len(seen.prompts), generator=generator)
        for rows in order.split(update.minibatch_prompts):
            numbers, microbatch = backward_with_oom_retry(policy, optimizer, seen, rows, update)
            update = replace(update, microbatch_prompts=microbatch)
            log.append(_step(optimizer, numbers, update))
            if update.update_kl_limit is not None and log[-1]["update_kl"] > update.update_kl_limit:
                return _summary(log, update, stopped=True)
    return _summary(log, update, stopped=False)


def backward_with_oom_retry(
    policy: Policy, optimizer, seen: Trajectory, rows: torch.Tensor, update: Update
) -> tuple[dict[str, float], int]:
    """Leave the gradients of a minibatch, rows [b] of `seen`; means of STATISTICS, and the microbatch that fits."""
    call = partial(_gradients, policy, optimizer, seen, rows, update)
    if isinstance(optimizer, InBackward):  # some parameters would have stepped already
        return call(update.microbatch_prompts), update.microbatch_prompts
    return find_executable_batch_size(call, update.microbatch_prompts)


def _gradients(
    policy: Policy, optimizer, seen: Trajectory, rows: torch.Tensor, update: Update, microbatch: int
) -> dict[str, float]:
    """Gradients of the microbatches add up to the minibatch's, normalised by its tokens; means of STATISTICS."""
    optimizer.zero_grad(set_to_none=True)
    tokens = seen.mask[rows].sum()
    totals = torch.zeros(len(STATISTICS), device=tokens.device)
    for part in rows.split(microbatch):
        loss, sums = _microbatch_loss(policy, seen, part, tokens, update)
        totals += sums
        if isinstance(optimizer, InBackward) and not _in_range(totals / tokens, update):
            break  # its backward pass would be the step
        loss.backward()
    return dict(zip(STATISTICS, (totals / tokens).tolist(), strict=True))


def _step(optimizer, numbers: dict[str, float], update: Update) -> dict[str, float]:
    """One optimiser step, unless the minibatch is to be skipped."""
    norm = gradient_norm(optimizer, update.max_gradient_norm)
    skipped = not (numbers["ratio"] <= update.max_ratio and norm < float("inf"))
    if not skipped:
        optimizer.step()
    return numbers | {"gradient_norm": norm, "skipped": float(skipped)}


def _microbatch_loss(
    policy: Policy, seen: Trajectory, rows: torch.Tensor, tokens: torch.Tensor, update: Update
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of some rows as their share of the minibatch's token mean, and STATISTICS summed over their tokens."""
    index = rows.tolist()
    scored = policy([seen.prompts[i] for i in index], [seen.responses[i] for i in index], kept_of(seen, index))
    width = scored.mask.shape[1]
    old_log_p, old_values, advantages, returns = (
        x[rows, :width] for x in (seen.log_p, seen.values, seen.advantages, seen.returns)
    )
    log_ratio = torch.where(scored.mask.bool(), scored.log_p - old_log_p, 0.0)
    ratio = log_ratio.exp()
    policy_part = losses.masked_sum(losses.policy_loss(ratio, advantages, update.clip_range), scored.mask)
    value_part = losses.masked_sum(
        losses.value_loss(scored.values, old_values, returns, update.value_clip_range), scored.mask
    )
    with torch.no_grad():
        outside = ((ratio - 1).abs() > update.clip_range).float()
        more = [losses.masked_sum(x, scored.mask) for x in (ratio, outside, kl_k3(old_log_p, scored.log_p))]
        sums = torch.stack([policy_part, value_part, *more])
    loss = (policy_part + update.value_coefficient * value_part) / tokens
    return loss, sums


def _in_range(means: torch.Tensor, update: Update) -> bool:
    return float(means[STATISTICS.index("ratio")]) <= update.max_ratio


def _summary(log: list[dict[str, float]], update: Update, stopped: bool) -> dict:
    means = {name: sum(row[name] for row in log) / len(log) for name in log[0] if name != "skipped"}
    return means | {
        "first_ratio": log[0]["ratio"],
        "minibatches": len(log),
        "microbatch_prompts": update.microbatch_prompts,
        "update_stopped_early": float(stopped),
        "skipped": sum(row["skipped"] for row in log),
        "skips": [bool(row["skipped"]) for row in log],
    }
