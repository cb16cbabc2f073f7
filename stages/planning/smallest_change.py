"""Find the change of a section that makes its stage fit a card and does least harm."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from stages.planning.hardware import Card
from stages.planning.stage_plan import StagePlan

SMALLER = {"fp32": ("bf16", "int8", "nf4"), "mixed": ("bf16", "int8", "nf4"), "bf16": ("int8", "nf4"),
           "int8": ("nf4",), "nf4": ()}
# Rows that are computed at once: fewer of them give the same result.
SIZES = ("microbatch_sequences", "microbatch_pairs", "microbatch_answers", "microbatch_prompts", "batch_prompts")


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
             if hasattr(settings, name)}
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
