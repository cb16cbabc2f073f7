"""Measure how the cost of our step grows with each size, and its cost at corners of the ranges of shapes."""

from dataclasses import replace
from math import log
from statistics import linear_regression

from benchmarks.ppo.flop_floor import Rates, flops
from benchmarks.ppo.processes import (
    LEGACY,
    OURS,
    RunSettings,
    median_floor,
    our_contender,
    peer_contenders,
    run_in_turns,
    summarise_runs,
)
from benchmarks.ppo.workload import Shape, prompts

AXES = {"batch": (8, 16, 32, 64), "response": (16, 32, 64, 128, 256), "width": (128, 256, 384, 512),
        "vocabulary": (2048, 4096, 8192, 16384, 32768)}
# Both ends of each range at least once (width 128-512, 2-12 layers, vocabulary 2k-32k, prompts 16-512, responses
# 16-256, batch 8-128), a few seconds per step at most.
CORNERS = {
    "narrow, deep": Shape(width=128, layers=12),
    "wide, shallow, few words": Shape(width=512, layers=2, vocabulary=2048),
    "large vocabulary": Shape(width=128, layers=2, vocabulary=32768),
    "long responses, small batch": Shape(layers=2, prompts=(16, 32), response=256, batch=8, minibatch=2),
    "long prompts": Shape(layers=2, prompts=(256, 512), response=16, batch=16, minibatch=4),
    "large batch": Shape(width=128, layers=4, response=32, batch=128, minibatch=32),
    "wide, deep": Shape(width=512, layers=12, prompts=(16, 64), response=32, batch=8, minibatch=2),
}


def exponent(sizes: list[float], seconds: list[float]) -> float:
    """Fit b of seconds = a size^b by least squares in logarithms."""
    return linear_regression([log(size) for size in sizes], [log(second) for second in seconds]).slope


def needed_flops(shape: Shape) -> float:
    """Count the FLOPs that a step of this shape needs."""
    return sum(flops(shape, [len(prompt) for prompt in prompts(shape, 1)[0]]).values())


def measure_growth(base: Shape, precision: str, settings: RunSettings) -> list[dict]:
    """Measure for each axis: sizes, seconds of our step, their exponent and that of the FLOPs needed."""
    measured: dict[Shape, float] = {}
    rows = []
    for axis, sizes in AXES.items():
        shapes = [replace(base, **{axis: size}) for size in sizes]
        for shape in shapes:
            if shape not in measured:
                runs, _ = run_in_turns([our_contender(precision)], shape, settings)
                measured[shape] = summarise_runs(runs[OURS], shape)[settings.basis]
        seconds = [measured[shape] for shape in shapes]
        rows.append({"axis": axis, "sizes": sizes, "seconds": seconds, "exponent": exponent(sizes, seconds),
                     "exponent_of_needed_flops": exponent(sizes, [needed_flops(shape) for shape in shapes])})
    return rows


def growth_rows(growth: list[dict]) -> list[list]:
    """Build the table of `measure_growth`."""
    return [[row["axis"], "  ".join(f"{size}: {second:.3g}" for size, second in
                                    zip(row["sizes"], row["seconds"], strict=True)),
             row["exponent"], row["exponent_of_needed_flops"]] for row in growth]


def measure_corners(folder, precision: str, settings: RunSettings, rates: Rates) -> list[dict]:
    """Measure ours, legacy TRL as shipped and the floor at every corner; a missing peer leaves None."""
    rows = []
    for name, shape in CORNERS.items():
        legacy = next(peer for peer in peer_contenders(folder, shape) if peer.name == LEGACY)
        runs, missing = run_in_turns([legacy, our_contender(precision)], shape, settings)
        sums = {contender: summarise_runs(results, shape) for contender, results in runs.items()}
        seconds = sums[OURS][settings.basis]
        floor = median_floor(shape, rates, settings.steps)
        rows.append({"name": name, "shape": shape.to_json(), "seconds": seconds, "floor_seconds": floor["seconds"],
                     "ratio_to_floor": seconds / floor["seconds"],
                     "ratio_to_legacy_trl": sums[LEGACY][settings.basis] / seconds if LEGACY in sums else None,
                     "memory_ratio_to_legacy": (sums[OURS]["peak_mb"] / sums[LEGACY]["peak_mb"]
                                                if LEGACY in sums else None),
                     "missing": missing, "contenders": sums})
    return rows


def corner_rows(corners: list[dict]) -> list[list]:
    """Build the table of `measure_corners`."""
    keys = ("seconds", "floor_seconds", "ratio_to_floor", "ratio_to_legacy_trl", "memory_ratio_to_legacy")
    return [[row["name"], *("missing" if row[key] is None else row[key] for key in keys)] for row in corners]
