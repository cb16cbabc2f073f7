"""Plan a stage: what its plan holds, what a training has in memory all the time, and the smallest change that fits it.

Of all changes of its section by which a stage fits a card, the smallest is the one that does least harm.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from itertools import product
from typing import Any, NamedTuple

from stages.planning.data_size import DataSize
from stages.planning.hardware import GIB, USABLE_SHARE, Card, Hardware
from stages.planning.shapes import QUANTISED, Shape
from stages.planning.steps import FP32, FULL, LORA, Training

BLOCK_ELEMENTS, MIN_8BIT_ELEMENTS = 256, 4096  # of bitsandbytes' 8-bit state (training/optimizers.py)
SMALLER = {"fp32": ("bf16", "int8", "nf4"), "mixed": ("bf16", "int8", "nf4"), "bf16": ("int8", "nf4"),
           "int8": ("nf4",), "nf4": ()}
# Rows that are computed at once: fewer of them give the same result.
SIZES = ("microbatch_sequences", "microbatch_pairs", "microbatch_answers", "microbatch_prompts", "batch_prompts")


class PlanRow(NamedTuple):
    """A part of the memory, in bytes."""

    name: str
    bytes: int
    note: str


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

    trained: parameters that are trained. memory: parts that are there at once. other_times: those of phases that need
    less. assumption: what tokens and seconds rest on. seconds: None if it is not known how much there is to do.
    """

    stage: str
    parameters: int
    trained: int
    memory: list[PlanRow]
    tokens: int
    flops: float
    seconds: float | None
    disk_bytes: int
    assumption: str = ""
    other_times: tuple[tuple[PlanRow, ...], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory of one card."""
        return sum(row.bytes for row in self.memory)

    def fits(self, card: Card) -> bool:
        """Check whether the card has that much memory, beside what the allocator and CUDA need."""
        return self.peak_bytes <= USABLE_SHARE * card.memory_gib * GIB


class Tensors(NamedTuple):
    """A number of trained tensors of one size, each a matrix; a vector has one row."""

    number: int
    rows: int
    columns: int
    item_bytes: int = FP32

    @property
    def count(self) -> int:
        """Return the number of parameters."""
        return self.number * self.rows * self.columns

    @property
    def bytes(self) -> int:
        """Return the bytes of the weights."""
        return self.count * self.item_bytes

    def state_bytes(self, optimizer: str) -> int:
        """Return the bytes of the optimizer's state, as training/optimizers.py predicts them of real tensors."""
        size = self.rows * self.columns
        if optimizer == "adafactor":
            return FP32 * self.number * (self.rows + self.columns if self.rows > 1 else size)
        if not optimizer.endswith("8bit"):
            return 2 * self.bytes
        return self.number * (2 * size + 8 * math.ceil(size / BLOCK_ELEMENTS) if size >= MIN_8BIT_ELEMENTS
                              else 8 * size)


def list_trained(shape: Shape, training: Training, scorer: bool = False) -> list[Tensors]:
    """List the tensors that are trained; scorer: of a classifier, whose score head is trained, too."""
    head = [Tensors(1, 1, shape.width)] if scorer else []
    if training.tune == LORA:
        return head + [Tensors(shape.layers, *size) for matrix in training.adapted(shape)
                       for size in ((training.rank, matrix.inputs), (matrix.outputs, training.rank))]
    if training.tune != FULL:
        return head
    tables = [shape.embedding_weights] + [shape.output_weights] * bool(shape.output_weights and not scorer)
    others = shape.count_parameters() - shape.output_weights - shape.layers * shape.layer_weights - tables[0]
    sizes = [(shape.layers, matrix.outputs, matrix.inputs) for matrix in shape.matrices]
    sizes += [(1, size // shape.width, shape.width) for size in tables] + [(1, 1, others)]
    return [Tensors(*size, training.state_bytes) for size in sizes]


def list_weights(shape: Shape, training: Training, trained: list[Tensors], optimizer: str, scorer: bool = False,
                 frozen_copy: bool = False) -> list[PlanRow]:
    """List weights, gradients and optimizer state; frozen_copy: of a model that is trained whole, as the reference."""
    is_frozen = training.tune != FULL or frozen_copy
    frozen = shape.stored_bytes(training.precision, scorer, training.tune == LORA) if is_frozen else 0
    size = sum(tensors.bytes for tensors in trained)
    return [PlanRow("frozen base", frozen, training.precision), PlanRow("trained parameters", size, ""),
            PlanRow("gradients", size, ""),
            PlanRow("optimizer state", sum(tensors.state_bytes(optimizer) for tensors in trained), optimizer)]


def shard(rows: list[PlanRow], shape: Shape, training: Training, count: int) -> list[PlanRow]:
    """Divide what is in the layers, adapters apart, by the number of processes; add the layers that are gathered."""
    layer = shape.layer_weights + shape.layer_vectors
    layer_bytes = layer * training.state_bytes
    if training.precision in QUANTISED:
        layer_bytes = shape.stored_bytes(training.precision, adapted=True) // max(shape.layers, 1)
    saved = shape.layers * layer_bytes * (count - 1) // count
    sizes = {row.name: row.bytes for row in rows}
    shares = {"reward model": saved if "reward model" in sizes else 0}
    if training.tune == FULL:  # gradients and state are split with the weights
        state = sizes["optimizer state"] / sizes["trained parameters"]
        shares |= {"trained parameters": saved, "gradients": saved, "optimizer state": int(saved * state)}
    else:
        shares["frozen base"] = saved
    return [row._replace(bytes=row.bytes - shares.get(row.name, 0)) for row in rows] + [
        PlanRow("gathered layers", 2 * layer_bytes, "one at work, one on its way")]


def disk_bytes(trained: list[Tensors], optimizer: str, saves: int, keep_checkpoints: int, keeps_best: bool) -> int:
    """Return the most bytes that a training has on the disk at once, as training/checkpoint_plan.py checks."""
    weights = sum(tensors.bytes for tensors in trained) * (1 + keeps_best)
    state = sum(tensors.state_bytes(optimizer) for tensors in trained)
    return min(saves, keep_checkpoints + 1) * (weights + state) + weights


def rollout_rows(shape: Shape, rows: int, row_tokens: int, precision: str, adapted: bool, merges_adapter: bool = False
                 ) -> list[PlanRow]:
    """List the memory of sampling rows at once, of so many tokens each: keys and values first.

    adapted: with an adapter, quantised weights leave fp32 states. merges_adapter: weights with it are beside the base.
    """
    state = FP32 if precision in ("fp32", "mixed") or (adapted and precision in QUANTISED) else 2
    parts = [PlanRow("keys and values", shape.kv_bytes(rows * row_tokens, state),
                     f"{rows} rows of {row_tokens} tokens, {'float32' if state == FP32 else 'bfloat16'}"),
             PlanRow("logits", 3 * FP32 * rows * shape.vocabulary, "of one token a row")]
    if merges_adapter and precision == "fp32":  # other precisions are not merged (adapters.py)
        parts.append(PlanRow("merged weights", FP32 * shape.layers * shape.layer_weights, "at most"))
    return parts


def reads_reward_model(settings: Any) -> bool:
    """Tell whether the reward stage's model is among the rewards of a section."""
    return any(source.source == "model" for source in settings.rewards)


def find_smallest_change(
    settings: Any, plan: Callable[[Any], StagePlan], card: Card, devices: int
) -> tuple[dict[str, object], StagePlan] | None:
    """Return the settings to change, with their new values, and the plan with them; None if nothing helps.

    Tried in this order, alone and together: fewer rows at once, gradient_checkpointing, sharding over the cards, which
    change nothing but rounding; then a lower precision, a smaller critic and at last fewer prompts in a rollout, which
    change the result.
    """
    for change in _list_changes(settings, devices):
        smallest = _valid(settings, _with_sizes(settings, change, 1))
        if smallest is None or not plan(smallest).fits(card):
            continue
        for fraction in _divisors(max((getattr(settings, name) for name in _sizes(settings)), default=1)):
            candidate = _valid(settings, _with_sizes(settings, change, fraction))
            if candidate is not None and (changed := plan(candidate)).fits(card):
                return {name: value for name, value in _with_sizes(settings, change, fraction).items()
                        if getattr(settings, name) != value}, changed
    return None


def _list_changes(settings: Any, devices: int) -> Iterator[dict[str, object]]:
    """Yield combinations of settings beside the rows at once, the least harmful first."""
    rollouts = _divisors(getattr(settings, "rollout_prompts", 0))
    others = {
        "rollout_prompts": [size for size in rollouts if size >= devices],
        "value_model": ["head"],
        "precision": SMALLER.get(getattr(settings, "precision", None), ()),
        "check_precision": ["bf16"],
        "sharding": ["fsdp"] if devices > 1 else [],
        "gradient_checkpointing": [True],
    }
    named = {name: list(dict.fromkeys([getattr(settings, name), *values])) for name, values in others.items()
             if name in {field.name for field in fields(settings)}}  # some have sharding as a constant
    for values in product(*named.values()):
        change = dict(zip(named, values, strict=True))
        if "rollout_prompts" in change:
            change["minibatch_prompts"] = min(settings.minibatch_prompts, change["rollout_prompts"])
        yield change


def _sizes(settings: Any) -> list[str]:
    return [name for name in SIZES if hasattr(settings, name)]


def _with_sizes(settings: Any, change: dict, limit: int) -> dict:
    """Return the change with at most `limit` rows at once."""
    batch = change.get("minibatch_prompts", limit)
    return {name: min(getattr(settings, name), limit, batch if name == "microbatch_prompts" else limit)
            for name in _sizes(settings)} | change


def _valid(settings: Any, change: dict) -> Any | None:
    """Return the section with the change, None if the recipe refuses the combination."""
    try:
        return replace(settings, **change)
    except ValueError:
        return None


def _divisors(size: int) -> list[int]:
    """List the divisors, the largest first, so that a smaller microbatch divides the batch still."""
    return [divisor for divisor in range(size, 0, -1) if size % divisor == 0]
