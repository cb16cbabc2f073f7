"""Attribute a step's seconds: phases compared with their floors, and the profiler's operators in a few groups."""

import time
from collections.abc import Callable
from statistics import median

PYTHON = "python and other"
GROUPS = {  # the first match wins; names as in the profiler
    PYTHON: ("Optimizer.", "autograd::engine", "ProfilerStep"),
    "attention": ("scaled_dot_product", "flash_attention", "bmm", "aten::_softmax"),
    "matrix products": ("mm", "linear", "aten::matmul", "mkldnn"),
    "copies": ("copy", "cat", "clone", "contiguous", "gather", "scatter", "index", "embedding", "fill", "zero", "pad",
               "constant", "to_copy", "stack", "select", "masked"),
}
PARTS = {"generate": ("prefill", "decode"), "reward": ("reward",), "old and reference": ("reference",),
         "optimise": ("optimise",), "other": ()}


def operator_group(name: str) -> str:
    """Return the group of an operator: attention, matrix products, copies, or elementwise for all others."""
    for group, words in GROUPS.items():
        if any(word in name for word in words):
            return group
    return "elementwise"


def profile_by_group(work: Callable) -> dict:
    """Measure wall seconds of `work` under torch's profiler by group and operator; the rest counts as Python's.

    The profiler has no CPU seconds, and these include its own cost: read shares, not seconds.
    """
    import torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    operators = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    groups = dict.fromkeys((*GROUPS, "elementwise"), 0.0)
    for name, seconds in operators.items():
        groups[operator_group(name)] += seconds
    groups[PYTHON] += max(0.0, total - sum(groups.values()))
    largest = sorted(operators.items(), key=lambda item: -item[1])[:20]
    return {"groups": groups, "operators": dict(largest)}


def phase_rows(steps: list[dict], floor: dict[str, float], prefill: dict[str, float]) -> list[list]:
    """Build the rows: phase, median CPU seconds, wall seconds, floor, ratio to it; generation also in its two parts."""
    rows = []
    for phase, parts in PARTS.items():
        seconds = [median(step["phases"].get(phase, {"cpu": 0.0, "wall": 0.0})[kind] for step in steps)
                 for kind in ("cpu", "wall")]
        rows.append(_row(phase, *seconds, sum(floor[part] for part in parts)))
        if phase == "generate":
            rows.append(_row("  prefill", prefill["cpu"], prefill["wall"], floor["prefill"]))
            rows.append(_row("  decode", seconds[0] - prefill["cpu"], seconds[1] - prefill["wall"], floor["decode"]))
    return rows


def _row(name: str, cpu: float, wall: float, floor: float) -> list:
    return [name, cpu, wall, floor, cpu / floor if floor else "-"]


def operator_rows(operators: dict) -> list[list]:
    """Build the rows: group or operator, seconds under the profiler, share of the step."""
    total = sum(operators["groups"].values())
    return [[name, seconds, seconds / total]
            for name, seconds in (*operators["groups"].items(), *(("  " + name, seconds) for name, seconds
                                                                  in operators["operators"].items()))]
