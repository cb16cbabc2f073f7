"""Hold one answer of the demo page and what is known of it. Without torch: votes are saved without it, too.

A log-ratio is log p(token) - log p_SFT(token) in nats, p being the policy that sampled the token, at the sampling
temperature (1 for greedy). Its sum over an answer is a one-sample estimate (k1) of the policy's KL to SFT.
"""

from dataclasses import dataclass, field
from typing import NamedTuple


class TextPiece(NamedTuple):
    """The text of some tokens, and the sum of their log-ratios in nats."""

    text: str
    log_ratio: float


@dataclass
class Answer:
    """One answer while it is generated; the same object is updated after each token.

    model: digest of the model, or ''. tokens: ids, including the EOS that ended the answer, if one did; those of
    best-of-n come when all `samples` are finished. seconds: spent on sampling `sampled_tokens`, those of all samples.
    When done: pieces, rewards of all samples (best first), and kl in nats, which for best-of-n is an upper bound.
    """

    policy: str
    model: str
    samples: int = 1
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    sampled_tokens: int = 0
    seconds: float = 0.0
    finished_samples: int = 0
    ended: bool = False
    pieces: list[TextPiece] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    kl: float = 0.0

    @property
    def done(self) -> bool:
        return bool(self.rewards)
