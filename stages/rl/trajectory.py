"""Compute what PPO needs of a rollout. Shapes: B responses (rows), R response tokens; padded on the right."""

from dataclasses import dataclass

import torch

from stages.distributed import group
from stages.generation.rollout import Rollout
from stages.modeling.packed.forward import own_chunks
from stages.modeling.packed.shared_prefix import row_lengths
from stages.rl.policy import Policy


@dataclass(frozen=True)
class RolloutScores:
    """Log-probabilities under the policy and the reference, and values, of each response token.

    All [B, R], fp32, 0 outside the mask.
    """

    logprobs: torch.Tensor
    ref_logprobs: torch.Tensor
    values: torch.Tensor
    mask: torch.Tensor

    def sequence_kl(self) -> float:
        """Estimate KL(policy || reference) by k1, summed over a response, mean over responses, in nats."""
        return float(((self.logprobs - self.ref_logprobs) * self.mask).sum(-1).mean())


@dataclass(frozen=True)
class Trajectory(RolloutScores):
    """A scored rollout with advantages and returns [B, R]: all that the update needs.

    sampler_logprobs: [B, R], those that the tokens were drawn with, where they are not `logprobs`; else None.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    advantages: torch.Tensor
    returns: torch.Tensor
    sampler_logprobs: torch.Tensor | None = None

    @classmethod
    def from_scores(
        cls, rollout: Rollout, scores: RolloutScores, advantages: torch.Tensor, returns: torch.Tensor,
        reuse_rollout_logprobs: bool = False,
    ) -> "Trajectory":
        """Join a rollout, its scores and its advantages; reuse_rollout_logprobs: as given to `score_rollout`."""
        return cls(**vars(scores), prompts=rollout.prompts, responses=rollout.responses, advantages=advantages,
                   returns=returns,
                   sampler_logprobs=None if reuse_rollout_logprobs else rollout.logprobs)

    def explained_variance(self) -> float:
        """Compute 1 - Var(returns - values) / Var(returns): 1 for perfect values, 0 for constant ones."""
        inside = self.mask.bool()
        returns, values = self.returns[inside], self.values[inside]
        return float(1 - (returns - values).var() / returns.var().clamp(min=1e-8))


@torch.no_grad()
def score_rollout(
    policy: Policy, rollout: Rollout, forward_prompts: int, reuse_rollout_logprobs: bool = False
) -> RolloutScores:
    """Compute log-probabilities and values of a rollout, `forward_prompts` rows of similar length at a time.

    The rows are shared among the processes. reuse_rollout_logprobs: take the sampler's log-probabilities and values
    instead of the policy's forward pass. Only valid where the start-up checks found both equal.
    """
    reuse = rollout.logprobs is not None and reuse_rollout_logprobs
    lengths = row_lengths(rollout.prompts, rollout.responses, policy.share_prompts)
    columns = max(map(len, rollout.responses))
    scores = torch.zeros(4, len(lengths), columns, device=policy.model.device)
    for rows in own_chunks(lengths, forward_prompts):
        texts = [rollout.prompts[i] for i in rows], [rollout.responses[i] for i in rows]
        ref_logprobs = policy.ref_logprobs(*texts)
        if reuse:
            logprobs, values = rollout.logprobs[rows], rollout.values[rows]
            mask = torch.arange(columns) < torch.tensor([[len(response)] for response in texts[1]])
        else:
            logprobs, values, mask = policy(*texts)
        for number, chunk in enumerate((logprobs, ref_logprobs, values, mask)):
            scores[number, rows, : chunk.shape[1]] = chunk.to(scores)
    return RolloutScores(*group.sum_tensor(scores))
