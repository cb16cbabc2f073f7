"""The protocol of a sampling engine: what it is given, and what it returns. Shapes: D hidden size, B rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from stages.generation.rollout import Rollout


@dataclass(frozen=True)
class SamplingRequest:
    """Prompts to sample a response to, and how; the fields are arguments of sampler.generate_stepwise.

    max_new_tokens: the limit of each row. precision: the policy's. value_fn: maps hidden states [B, D] to values [B].
    """

    prompts: list[list[int]]
    max_new_tokens: list[int]
    temperature: float
    stop_ids: Sequence[int]
    precision: str = "fp32"
    top_k: int = 0
    top_p: float = 1.0
    share_prefixes: bool = False
    value_fn: Callable[[torch.Tensor], torch.Tensor] | None = None

    def select(self, rows: range) -> "SamplingRequest":
        """Return the request of these rows alone."""
        part = slice(rows.start, rows.stop)
        return replace(self, prompts=self.prompts[part], max_new_tokens=self.max_new_tokens[part])


class SamplingEngine(Protocol):
    """Something that samples responses from a model."""

    name: str

    def sample(self, model, request: SamplingRequest, generator: torch.Generator) -> Rollout:
        """Sample one response per prompt from the policy's model, as Policy.merge_adapter yields it.

        All randomness comes from `generator`. The rows are shared among the processes, and each gets all of them.

        The rollout has either the policy's statistics per token (logprobs, values, entropy), or sampler_logprobs: the
        engine's own log-probabilities, which are compared with the policy's and are no old log-probabilities.
        """
