"""The result of sampling: responses, and what the sampler knows of each token. Shapes: B rows, R tokens."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rollout:
    """Sampled responses: token ids, including the stop id that ended them, if one did.

    logprobs, values, entropy: of each sampled token, [B, R] fp32, 0 after a response's end; None unless requested.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    ended: list[bool]
    logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    entropy: torch.Tensor | None = None

    def decode(self, tokenizer) -> list[str]:
        """Decode the responses to text, without special tokens."""
        return tokenizer.batch_decode(self.responses, skip_special_tokens=True)

    def metrics(self) -> dict[str, float]:
        """Compute the mean length in tokens, the share that ended and the share of distinct responses."""
        count = len(self.responses)
        return {
            "response_tokens": sum(map(len, self.responses)) / count,
            "eos_rate": sum(self.ended) / count,
            "distinct_responses": len({tuple(response) for response in self.responses}) / count,
        }
