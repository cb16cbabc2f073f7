"""How the cost of our step grows, one size varied at a time, and at corners of the ranges of shapes."""

from dataclasses import replace
from math import log
from statistics import linear_regression

from benchmarks.ppo.flop_floor import Rates, flops
from benchmarks.ppo.processes import LEGACY, OURS, Setting, floor_of, in_turns, ours, peers, summary
from benchmarks.ppo.workload import Shape, prompts

AXES = {"batch": (8, 16, 32, 64), "response": (16, 32, 64, 128, 256), "width": (128, 256, 384, 512),
        "vocabulary": (2048, 4096, 8192, 16384, 32768)}
# Each range's two ends at least once (width 128-512, 2-12 layers, vocabulary 2k-32k, prompts 16-512, responses 16-256,
# batch 8-128), no more than some seconds a step.
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
    """b of seconds = a size^b: the least-squares line in logarithms."""
    return linear_regression([log(size) for size in sizes], [log(second) for second in seconds]).slope


def needed(shape: Shape) -> float:
    """FLOPs that a step of this shape needs."""
    return sum(flops(shape, [len(prompt) for prompt in prompts(shape, 1)[0]]).values())


def growth(shape: Shape, precision: str, setting: Setting) -> list[dict]:
    """For each axis: sizes, seconds a step of ours, their exponent and that of the FLOPs needed."""
    measured: dict[Shape, float] = {}
    found = []
    for axis, sizes in AXES.items():
        shapes = [replace(shape, **{axis: size}) for size in sizes]
        for one in shapes:
            if one not in measured:
                runs, _ = in_turns([ours(precision)], one, setting)
                measured[one] = summary(runs[OURS], one)[setting.basis]
        taken = [measured[one] for one in shapes]
        found.append({"axis": axis, "sizes": sizes, "seconds": taken, "exponent": exponent(sizes, taken),
                      "exponent_of_needed_flops": exponent(sizes, [needed(one) for one in shapes])})
    return found


def growth_rows(found: list[dict]) -> list[list]:
    return [[one["axis"], "  ".join(f"{size}: {second:.3g}" for size, second in
                                    zip(one["sizes"], one["seconds"], strict=True)),
             one["exponent"], one["exponent_of_needed_flops"]] for one in found]


def sweep(folder, precision: str, setting: Setting, rates: Rates) -> list[dict]:
    """Ours beside legacy TRL as shipped and beside the floor, at every corner; a missing peer leaves None."""
    found = []
    for name, shape in CORNERS.items():
        legacy = next(peer for peer in peers(folder, shape) if peer.name == LEGACY)
        runs, missing = in_turns([legacy, ours(precision)], shape, setting)
        sums = {who: summary(of, shape) for who, of in runs.items()}
        taken = sums[OURS][setting.basis]
        floor = floor_of(shape, rates, setting.steps)
        found.append({"name": name, "shape": shape.written(), "seconds": taken, "floor_seconds": floor["seconds"],
                      "ratio_to_floor": taken / floor["seconds"],
                      "ratio_to_legacy_trl": sums[LEGACY][setting.basis] / taken if LEGACY in sums else None,
                      "memory_ratio_to_legacy": (sums[OURS]["peak_mb"] / sums[LEGACY]["peak_mb"]
                                                 if LEGACY in sums else None),
                      "missing": missing, "contenders": sums})
    return found


def sweep_rows(found: list[dict]) -> list[list]:
    keys = ("seconds", "floor_seconds", "ratio_to_floor", "ratio_to_legacy_trl", "memory_ratio_to_legacy")
    return [[one["name"], *("missing" if one[key] is None else one[key] for key in keys)] for one in found]
