"""Show a plan: as a table in the terminal, as JSON, and as a page."""

from typing import NamedTuple

from stages.planning.stage_plan import Hardware, StagePlan
from stages.render.html import Html, element, join_html, table
from stages.render.terminal import format_columns
from stages.render.units import format_bytes, format_duration
from stages.training.memory_estimate import format_plan

HEAD = ("stage", "parameters", "trained", "memory", "fits", "PFLOP", "tokens", "disk", "time")


class Change(NamedTuple):
    """The change of a stage's section that makes it fit, and its peak then; no settings: none is known."""

    settings: dict[str, object]
    peak_bytes: int


def format_plans(title: str, plans: list[StagePlan], changes: dict[str, Change], hardware: Hardware) -> list[str]:
    """Format the plan of a recipe: a line a stage, what does not fit, and the parts of the memory of each training."""
    lines = [title, _describe(hardware), *format_columns([HEAD, *(_row(plan, hardware) for plan in plans)])]
    lines += [f"  {stage}: {_describe_change(change)}" for stage, change in changes.items()]
    for plan in plans:
        if plan.trained:
            lines += [f"memory of {plan.stage}; {plan.assumption}",
                      *(f"  {line}" for line in format_plan([row for row in plan.memory if row.bytes]))]
    return lines


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
        "body", element("h1", title), element("p", _describe(hardware)),
        table(HEAD, [_row(plan, hardware) for plan in plans]),
        element("ul", *(element("li", f"{stage}: {_describe_change(change)}") for stage, change in changes.items())),
        *parts)
    return join_html([Html("<!doctype html>"), element(
        "html", element("head", element("meta", charset="utf-8"), element("title", title)), body, lang="en")])


def _row(plan: StagePlan, hardware: Hardware) -> tuple[str, ...]:
    return (plan.stage, f"{plan.parameters:,}", f"{plan.trained:,}", format_bytes(plan.peak_bytes),
            "yes" if plan.fits(hardware.card) else "NO", f"{plan.flops / 1e15:,.0f}", f"{plan.tokens:,}",
            format_bytes(plan.disk_bytes), format_duration(plan.seconds) if plan.seconds else "-")


def _describe(hardware: Hardware) -> str:
    card = hardware.card
    return (f"{hardware.devices} x {card.memory_gib:g} GiB ({card.name}), at {hardware.share:.0%} of {card.tflops:g} "
            f"TFLOP/s (bf16) and of {card.bandwidth_gb_s:,.0f} GB/s; memory is of one card, without the "
            f"allocator's own")


def _describe_change(change: Change) -> str:
    if not change.settings:
        return "does not fit, and none of the settings that the plan tries makes it fit"
    settings = ", ".join(f"{name}: {_plain(value)}" for name, value in change.settings.items())
    return f"does not fit; it does with {{{settings}}}: {format_bytes(change.peak_bytes)}"


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value
