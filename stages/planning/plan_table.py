"""Show a plan: as a table in the terminal, and as JSON."""

import math
from typing import NamedTuple

import yaml

from stages.planning.hardware import USABLE_SHARE, Hardware
from stages.planning.stage_plan import Change, StagePlan
from stages.render.terminal import format_columns

# Columns of the table for the parts of the memory.
COLUMNS = {
    "weights": ("frozen base", "reward model", "reward adapters", "target heads", "gathered layers", "merged weights"),
    "adapter": ("trained parameters",),
    "grads": ("gradients",),
    "optim": ("optimizer state", "optimizer step"),
    "activ": ("activations, logits", "dequantised matrix", "bf16 copies", "forward pass"),
    "KV": ("keys and values",),
    "logits": ("logits",),
}
HEAD = ("stage", "params", "trained", *COLUMNS, "peak", "fits", "hours", "PFLOP", "tokens", "disk")


class RecipePlan(NamedTuple):
    """The plan of a recipe: its stages, and the changes of those that do not fit."""

    title: str
    hardware: Hardware
    stages: list[StagePlan]
    changes: dict[str, Change]


def format_plan(plan: RecipePlan) -> list[str]:
    """Format the plan: a line a stage, what does not fit, and what the numbers rest on."""
    hours = sum(stage.seconds or 0 for stage in plan.stages) / 3600
    rows = [HEAD, *(_row(stage, "yes" if stage.fits(plan.hardware.card) else "NO") for stage in plan.stages)]
    lines = [plan.title, *_describe_hardware(plan.hardware), *format_columns(rows),
             f"in all {_short(hours)} hours, one stage after the other, and "
             f"{_gib(sum(stage.disk_bytes for stage in plan.stages))} GiB of disk beside the data"]
    if plan.changes:
        lines += ["does not fit, and the smallest change that makes it fit:",
                  *(f"  {stage}: {_describe_change(stage, change)}" for stage, change in plan.changes.items())]
    notes: dict[str, list[str]] = {}
    for stage in plan.stages:
        notes.setdefault(stage.assumption, []).append(stage.stage)
    return [*lines, "the numbers rest on:", *(f"  {', '.join(stages)}: {note}" for note, stages in notes.items())]


def plan_facts(plan: RecipePlan) -> dict:
    """Return the plan as JSON."""
    hardware = plan.hardware
    return {
        "device": hardware.card._asdict(), "devices": hardware.devices, "share": hardware.share,
        "stages": {stage.stage: stage._asdict() | {
            "peak_bytes": stage.peak_bytes, "fits": stage.fits(hardware.card)} for stage in plan.stages},
        "changes": {stage: change._asdict() for stage, change in plan.changes.items()},
    }


def _describe_hardware(hardware: Hardware) -> list[str]:
    """Say which cards are planned, at which rates, and what fits them."""
    card, share = hardware.card, hardware.share
    fp32 = f"; fp32: {card.fp32_tflops:.3g}" if card.fp32_tflops else ""
    return [f"{hardware.devices} x {card.memory_gib:.3g} GiB ({card.name}), at {share:.0%} of "
            f"{card.tflops:.3g} TFLOP/s (bf16{fp32}) and of {card.bandwidth_gb_s:,.0f} GB/s",
            f"memory in GiB, of one card; a stage fits if it needs at most {USABLE_SHARE:.0%} of it: CUDA and its "
            f"allocator need the rest"]


def _row(plan: StagePlan, fits: str) -> tuple[str, ...]:
    sizes = {name: sum(plan.memory.get(part, 0) for part in parts) for name, parts in COLUMNS.items()}
    hours = "?" if plan.seconds is None else _short(plan.seconds / 3600)
    return (plan.stage, _count(plan.parameters), _count(plan.trained), *map(_gib, sizes.values()),
            _gib(plan.peak_bytes), fits, hours, _short(plan.flops / 1e15), _count(plan.tokens), _gib(plan.disk_bytes))


def _describe_change(stage: str, change: Change) -> str:
    if not change.settings:
        return "none of the settings that the plan tries makes it fit"
    settings = yaml.safe_dump(change.settings, default_flow_style=True, sort_keys=False, width=math.inf).strip()
    section = "merge" if stage.endswith("-merged") else {"judge": "reward"}.get(stage, stage)
    return f"{section}={settings} needs {_gib(change.peak_bytes)} GiB"


def _gib(size: int) -> str:
    return _short(size / (1 << 30))


def _short(number: float) -> str:
    """Format with three digits that matter; next to nothing is a dash."""
    if number < 0.005:
        return "-"
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def _count(number: int) -> str:
    """Format as 6.74 B or 8.4 M."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else "-"
