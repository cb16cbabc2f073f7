"""Find the change of a section that makes its stage fit a card and does least harm."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from stages.planning.cards import Card
from stages.planning.stage_plan import StagePlan

SMALLER = ("fp32", "mixed", "bf16", "int8", "nf4")  # precisions, each with weights no larger than the one before
MICROBATCHES = ("microbatch_sequences", "microbatch_pairs", "microbatch_prompts")


def find_smallest_change(
    settings: Any, plan: Callable[[Any], StagePlan], card: Card, devices: int
) -> tuple[dict[str, object], StagePlan] | None:
    """Return the settings to change, with their new values, and the plan with them; None if nothing helps.

    A smaller microbatch gives the same result, as do checkpointing and sharding up to rounding; a lower precision and
    another critic do not. The settings are tried in this order: microbatch, gradient_checkpointing, precision,
    value_model, sharding.
    """
    for change in _list_changes(settings, devices):
        smallest = _valid(settings, change | {_microbatch(settings): 1})
        if smallest is None or not plan(smallest).fits(card):
            continue
        for size in _divisors(getattr(settings, _microbatch(settings))):
            candidate = _valid(settings, change | {_microbatch(settings): size})
            if candidate is not None and (changed := plan(candidate)).fits(card):
                values = {name: value for name, value in {_microbatch(settings): size, **change}.items()
                          if getattr(settings, name) != value}
                return values, changed
    return None


def _list_changes(settings: Any, devices: int) -> Iterator[dict[str, object]]:
    """Yield combinations of settings beside the microbatch, the least harmful first."""
    critics = [settings.value_model] if hasattr(settings, "value_model") else []
    if critics and critics[0] != "head":
        critics.append("head")
    shardings = ["none", "fsdp"] if devices > 1 and settings.sharding == "none" else [settings.sharding]
    precisions = SMALLER[SMALLER.index(settings.precision):]
    checkpointing = [False, True] if not settings.gradient_checkpointing else [True]
    for sharding, critic, precision, recompute in product(shardings, critics or [None], precisions, checkpointing):
        change = {"gradient_checkpointing": recompute, "precision": precision, "sharding": sharding}
        yield change | ({"value_model": critic} if critics else {})


def _microbatch(settings: Any) -> str:
    return next(name for name in MICROBATCHES if hasattr(settings, name))


def _valid(settings: Any, change: dict) -> Any | None:
    """Return the section with the change, None if the recipe refuses the combination."""
    try:
        return replace(settings, **change)
    except ValueError:
        return None


def _divisors(size: int) -> list[int]:
    """List the divisors, the largest first, so that a smaller microbatch divides the batch still."""
    return [divisor for divisor in range(size, 0, -1) if size % divisor == 0]
