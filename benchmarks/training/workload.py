"""The training pass that our trainer and TRL's are timed on.

Measured: CPU seconds (of all threads) and wall seconds from the first loss of the pass to its last optimiser step. That
is forward and backward passes, optimiser and schedule, the trainer's loop with its logging, and the fetching of all
batches but the first. Not measured: imports, loading, tokenising and packing, building trainers, saving; and a warm-up
in the same process, a pass over a few of the items with a learning rate of 0, which leaves the weights as they were.

It runs in a peer's process: nothing from stages/ is imported.
"""

import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.ppo.workload import Clock

MODEL, PAIRS, DOCUMENTS = "model", "pairs.parquet", "documents.arrow"  # in the folder of a work
WARM_UP_STEPS = 2


@dataclass(frozen=True)
class Work:
    """Settings that all contenders share.

    Args:
        folder: holds the initial model and the data.
        batch: pairs or blocks per step.
        questions: questions per step of training by question, which has a separate learning rate.
        targets: layers with an adapter; none: PEFT's choice.
    """

    folder: str = "."
    batch: int = 4
    questions: int = 4
    length: int = 512
    learning_rate: float = 2e-5
    question_learning_rate: float = 2e-5
    schedule: str = "linear"
    weight_decay: float = 0.001
    rank: int = 8
    alpha: int = 32
    dropout: float = 0.0
    precision: str = "fp32"
    targets: tuple[str, ...] = ()
    beta: float = 0.1
    seed: int = 0

    @classmethod
    def from_json(cls, text: str) -> "Work":
        fields = json.loads(text)
        return cls(**fields | {"targets": tuple(fields["targets"])})

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def path(self, name: str) -> Path:
        return Path(self.folder) / name


class Meter:
    """Measure the seconds of each optimiser step of a pass, and sum up what its losses read."""

    def __init__(self):
        self.clock, self.timing = Clock(), False
        self.read = {"items": 0, "tokens": 0, "computed_tokens": 0, "attended": 0, "digest": 0}

    def record_loss(self, items: int, texts: Iterable, computed_tokens: int, attended: int | None = None) -> None:
        """Record what a loss reads; call it before each loss.

        Args:
            texts: token ids without padding. Their digest does not depend on their order.
            computed_tokens: tokens that the model computes, padding included.
            attended: pairs of a token and one that it attends to, without padding; None: each text is computed alone.
        """
        if not self.timing:
            return
        if not self.read["items"]:
            self.clock.start_step()
        texts = [bytes(memoryview(text)) for text in map(_int64, texts)]
        self.read["items"] += items
        self.read["tokens"] += sum(map(len, texts)) // 8
        self.read["computed_tokens"] += computed_tokens
        self.read["attended"] += sum(attended_pairs(len(text) // 8) for text in texts) if attended is None else attended
        self.read["digest"] += sum(map(zlib.crc32, texts))

    def time(self, train: Callable, few, whole, learning_rate: float) -> None:
        """Call train(data, learning_rate) for the warm-up, then for the measured pass."""
        from torch.optim.optimizer import register_optimizer_step_post_hook
        train(few, 0.0)
        self.clock.end_step()
        self.timing = True
        hook = register_optimizer_step_post_hook(lambda *_: self.clock.end_step())
        try:
            train(whole, learning_rate)
        finally:
            hook.remove()


def attended_pairs(tokens: int) -> int:
    """Count the pairs of a token and itself or an earlier one."""
    return tokens * (tokens + 1) // 2


def _int64(ids):
    import numpy as np
    return np.ascontiguousarray(ids, np.int64)
