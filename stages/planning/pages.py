"""Show a plan: as a table in the terminal, as JSON, and as a page."""

from stages.planning.hardware import USABLE_SHARE, Hardware
from stages.planning.stage_plan import Change, StagePlan
from stages.render.html import Html, element, join_html, table
from stages.render.terminal import format_columns
from stages.render.units import format_bytes

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


def format_plans(title: str, plans: list[StagePlan], changes: dict[str, Change], hardware: Hardware) -> list[str]:
    """Format the plan of a recipe: a line a stage, what does not fit, and what the numbers rest on."""
    hours = sum(plan.seconds or 0 for plan in plans) / 3600
    rows = [_row(plan, hardware) for plan in plans]
    lines = [title, *_describe(hardware), *format_columns([HEAD, *rows]),
             f"in all {_short(hours)} hours, one stage after the other, and "
             f"{_gib(sum(plan.disk_bytes for plan in plans))} GiB of disk beside the data"]
    if changes:
        lines += ["does not fit, and the smallest change that makes it fit:",
                  *(f"  {stage}: {_describe_change(stage, change)}" for stage, change in changes.items())]
    notes: dict[str, list[str]] = {}
    for plan in plans:
        notes.setdefault(plan.assumption, []).append(plan.stage)
    return [*lines, "the numbers rest on:", *(f"  {', '.join(stages)}: {note}" for note, stages in notes.items())]


def plan_facts(plans: list[StagePlan], changes: dict[str, Change], hardware: Hardware) -> dict:
    """Return the plan as JSON."""
    return {
        "device": hardware.card._asdict(), "devices": hardware.devices, "share": hardware.share,
        "stages": {plan.stage: plan._asdict() | {
            "memory": {row.name: row.bytes for row in plan.memory}, "peak_bytes": plan.peak_bytes,
            "fits": plan.fits(hardware.card)} for plan in plans},
        "changes": {stage: change._asdict() for stage, change in changes.items()},
    }


def render_page(title: str, plans: list[StagePlan], changes: dict[str, Change], hardware: Hardware) -> Html:
    """Build the page, without scripts and without anything loaded."""
    parts = [join_html([element("h2", plan.stage), element("p", plan.assumption), table(
        ("part", "memory", ""), [(row.name, format_bytes(row.bytes), row.note) for row in plan.memory])])
        for plan in plans if plan.memory]
    body = element(
        "body", element("h1", title), *(element("p", line) for line in _describe(hardware)),
        table(HEAD, [_row(plan, hardware) for plan in plans]),
        element("ul", *(element("li", f"{stage}: {_describe_change(stage, change)}")
                        for stage, change in changes.items())), *parts)
    return join_html([Html("<!doctype html>"), element(
        "html", element("head", element("meta", charset="utf-8"), element("title", title)), body, lang="en")])


def _row(plan: StagePlan, hardware: Hardware) -> tuple[str, ...]:
    sizes = {name: sum(row.bytes for row in plan.memory if row.name in parts) for name, parts in COLUMNS.items()}
    hours = "?" if plan.seconds is None else _short(plan.seconds / 3600)
    return (plan.stage, _count(plan.parameters), _count(plan.trained), *map(_gib, sizes.values()),
            _gib(plan.peak_bytes), "yes" if plan.fits(hardware.card) else "NO", hours, _short(plan.flops / 1e15),
            _count(plan.tokens), _gib(plan.disk_bytes))


def _describe(hardware: Hardware) -> list[str]:
    card = hardware.card
    fp32 = f"; fp32: {card.fp32_tflops:.3g}" if card.fp32_tflops else ""
    return [f"{hardware.devices} x {card.memory_gib:.3g} GiB ({card.name}), at {hardware.share:.0%} of "
            f"{card.tflops:.3g} TFLOP/s (bf16{fp32}) and of {card.bandwidth_gb_s:,.0f} GB/s",
            f"memory in GiB, of one card; a stage fits if it needs at most {USABLE_SHARE:.0%} of it: CUDA and its "
            f"allocator need the rest"]


def _describe_change(stage: str, change: Change) -> str:
    if not change.settings:
        return "none of the settings that the plan tries makes it fit"
    settings = ", ".join(f"{name}: {_plain(value)}" for name, value in change.settings.items())
    section = "merge" if stage.endswith("-merged") else {"judge": "reward"}.get(stage, stage)
    return f"{section}={{{settings}}} needs {_gib(change.peak_bytes)} GiB"


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


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
