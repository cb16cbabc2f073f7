"""Where a step's seconds go: phases against their own floors, and the profiler's operators in a few groups."""

import time
from collections.abc import Callable
from statistics import median

PYTHON = "python and other"
GROUPS = {  # first match wins; names as the profiler has them
    PYTHON: ("Optimizer.", "autograd::engine", "ProfilerStep"),
    "attention": ("scaled_dot_product", "flash_attention", "bmm", "aten::_softmax"),
    "matrix products": ("mm", "linear", "aten::matmul", "mkldnn"),
    "copies": ("copy", "cat", "clone", "contiguous", "gather", "scatter", "index", "embedding", "fill", "zero", "pad",
               "constant", "to_copy", "stack", "select", "masked"),
}
PARTS = {"generate": ("prefill", "decode"), "reward": ("reward",), "old and reference": ("reference",),
         "optimise": ("optimise",), "other": ()}


def group_of(name: str) -> str:
    """The group of an operator: attention, matrix products, copies, or elementwise for all others."""
    for group, words in GROUPS.items():
        if any(word in name for word in words):
            return group
    return "elementwise"


def grouped(work: Callable) -> dict:
    """Wall seconds of `work` under torch's profiler: by group, by operator; what no operator covers is Python's.

    The profiler knows no CPU seconds, and its own cost is in these: read shares, not seconds.
    """
    import torch
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        start = time.perf_counter()
        work()
        total = time.perf_counter() - start
    operators = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    groups = dict.fromkeys((*GROUPS, "elementwise"), 0.0)
    for name, seconds in operators.items():
        groups[group_of(name)] += seconds
    groups[PYTHON] += max(0.0, total - sum(groups.values()))
    largest = sorted(operators.items(), key=lambda item: -item[1])[:20]
    return {"groups": groups, "operators": dict(largest)}


def phase_rows(steps: list[dict], floor: dict[str, float], prefill: dict[str, float]) -> list[list]:
    """Phase, CPU seconds (medians), wall seconds, floor, ratio to it; generation in its two parts, too."""
    rows = []
    for phase, parts in PARTS.items():
        taken = [median(step["phases"].get(phase, {"cpu": 0.0, "wall": 0.0})[kind] for step in steps)
                 for kind in ("cpu", "wall")]
        rows.append(_row(phase, *taken, sum(floor[part] for part in parts)))
        if phase == "generate":
            rows.append(_row("  prefill", prefill["cpu"], prefill["wall"], floor["prefill"]))
            rows.append(_row("  decode", taken[0] - prefill["cpu"], taken[1] - prefill["wall"], floor["decode"]))
    return rows


def _row(name: str, cpu: float, wall: float, floor: float) -> list:
    return [name, cpu, wall, floor, cpu / floor if floor else "-"]


def operator_rows(operators: dict) -> list[list]:
    """Group or operator, seconds under the profiler, share of the step."""
    total = sum(operators["groups"].values())
    return [[name, seconds, seconds / total]
            for name, seconds in (*operators["groups"].items(), *(("  " + name, seconds) for name, seconds
                                                                  in operators["operators"].items()))]
