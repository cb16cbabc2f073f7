"""TODO docstring."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rollout:
    """Responses as sampled: token ids with the stop id that ended them, if one did.

    log_p, values, entropy: of each sampled token, [B, R] fp32, 0 after a response's end; None unless asked for.
    kept: ids [B, R, K] that each token was drawn among, -1 for none; None: the whole vocabulary.
    """

    prompts: list[list[int]]
    responses: list[list[int]]
    ended: list[bool]
    log_p: torch.Tensor | None = None
    values: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    kept: torch.Tensor | None = None

    def texts(self, tokenizer) -> list[str]:
        return tokenizer.batch_decode(self.responses, skip_special_tokens=True)

    def numbers(self) -> dict[str, float]:
        """Mean length, share that ended, share of distinct responses."""
        count = len(self.responses)
        return {
            "response_tokens": sum(map(len, self.responses)) / count,
            "eos_rate": sum(self.ended) / count,
            "distinct_responses": len({tuple(response) for response in self.responses}) / count,
        }
