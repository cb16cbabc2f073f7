"""Plan a stage: what its plan holds, what a training has in memory all the time, and the smallest change that fits it.

Of all changes of its section by which a stage fits a card, the smallest is the one that does least harm.
"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from stages.planning.data_size import DataSize
from stages.planning.hardware import GIB, USABLE_SHARE, Card, Hardware
from stages.planning.shapes import QUANTISED, Shape
from stages.planning.steps import FP32

SMALLER = {"fp32": ("bf16", "int8", "nf4"), "mixed": ("bf16", "int8", "nf4"), "bf16": ("int8", "nf4"),
           "int8": ("nf4",), "nf4": ()}
# Rows that are computed at once: fewer of them give the same result.
SIZES = ("microbatch_sequences", "microbatch_pairs", "microbatch_answers", "microbatch_prompts", "batch_prompts")


Memory = dict[str, int]  # bytes of each part


class Run(NamedTuple):
    """What the plans of all stages rest on: the base, the hardware, and how much text there is.

    reward: the section of the reward model. policies: number of those that the evaluation compares.
    """

    shape: Shape
    hardware: Hardware
    size: DataSize
    reward: Any
    policies: int = 1


class StagePlan(NamedTuple):
    """One stage: parameters, memory of one card by part, and what the whole stage computes and writes.

    trained: parameters that are trained. memory: the parts of the phase that needs most. assumption: what tokens and
    seconds rest on. seconds: None if it is not known how much there is to do.
    """

    stage: str
    parameters: int
    trained: int
    memory: Memory
    tokens: int
    flops: float
    seconds: float | None
    disk_bytes: int
    assumption: str = ""

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of one card."""
        return sum(self.memory.values())

    def after(self, memory: Memory, tokens: int, flops: float, seconds: float) -> "StagePlan":
        """Return the plan with a phase before it."""
        return self._replace(memory=largest(self.memory, memory), tokens=self.tokens + tokens,
                             flops=self.flops + flops, seconds=self.seconds + seconds)

    def fits(self, card: Card) -> bool:
        """Check whether the card has that much memory, beside what the allocator and CUDA need."""
        return self.peak_bytes <= USABLE_SHARE * card.memory_gib * GIB


class Change(NamedTuple):
    """The change of a stage's section that makes it fit, and its peak then; no settings: none is known."""

    settings: dict[str, object]
    peak_bytes: int


def largest(*phases: Memory) -> Memory:
    """Return the memory of the phase that needs most."""
    return max(phases, key=lambda memory: sum(memory.values()))


def rollout_memory(shape: Shape, rows: int, row_tokens: int, precision: str, adapted: bool = False,
                   merges_adapter: bool = False) -> Memory:
    """Return the memory of sampling rows at once, of so many tokens each.

    adapted: with an adapter, quantised weights leave fp32 states. merges_adapter: weights with it are beside the base.
    """
    state_bytes = FP32 if precision in ("fp32", "mixed") or (adapted and precision in QUANTISED) else 2
    memory = {"keys and values": 2 * shape.layers * shape.kv_width * rows * row_tokens * state_bytes,
              "logits": 3 * FP32 * rows * shape.vocabulary}  # of one token a row
    if merges_adapter and precision == "fp32":  # other precisions are not merged (adapters.py)
        memory["merged weights"] = FP32 * shape.layers * shape.layer_weights
    return memory


def reads_reward_model(settings: Any) -> bool:
    """Tell whether the reward stage's model is among the rewards of a section."""
    return any(source.source == "model" for source in settings.rewards)


def find_smallest_change(settings: Any, plan: Callable[[Any], StagePlan], hardware: Hardware) -> Change:
    """Return the settings to change so that a stage fits, with their new values, and its peak then.

    Tried in this order, alone and together: fewer rows at once, gradient_checkpointing, sharding over the cards, which
    change nothing but rounding; then a lower precision, a smaller critic and at last fewer prompts in a rollout, which
    change the result.
    """
    for change in _list_changes(settings, hardware.devices):
        try:
            changed = replace(settings, **change)
        except ValueError:  # the recipe refuses the combination
            continue
        planned = plan(changed)
        if planned.fits(hardware.card):
            return Change({name: value for name, value in change.items() if getattr(settings, name) != value},
                          planned.peak_bytes)
    return Change({}, 0)


def _list_changes(settings: Any, devices: int) -> Iterator[dict[str, object]]:
    """Yield settings of a section with new values, the least harmful first."""
    own = {field.name: getattr(settings, field.name) for field in fields(settings)}
    sizes = {name: own[name] for name in SIZES if name in own}
    others = {
        "rollout_prompts": [size for size in _divisors(own.get("rollout_prompts", 0)) if size >= devices],
        "value_model": ["head"],
        "precision": SMALLER.get(own.get("precision"), ()),
        "check_precision": ["bf16"],
        "sharding": ["fsdp"] if devices > 1 else [],
        "gradient_checkpointing": [True],
    }
    named = {name: dict.fromkeys([own[name], *values]) for name, values in others.items() if name in own}
    for *values, limit in product(*named.values(), _divisors(max(sizes.values(), default=1))):
        change = dict(zip(named, values, strict=True))
        if "rollout_prompts" in change:
            change["minibatch_prompts"] = min(own["minibatch_prompts"], change["rollout_prompts"])
        largest = min(limit, change.get("minibatch_prompts", limit))
        yield {name: min(size, largest) for name, size in sizes.items()} | change


def _divisors(size: int) -> list[int]:
    """List the divisors, the largest first, so that a smaller microbatch divides the batch still."""
    return [divisor for divisor in range(size, 0, -1) if size % divisor == 0]
