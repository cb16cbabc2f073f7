"""Compute the least seconds of a PPO step: the FLOPs and bytes that it needs, over what this machine reaches.

    python -m benchmarks.ppo.flop_floor --precision fp32

Needed: every token once and no padding; logits of response tokens only (and one per prompt, to start sampling); old
log-probabilities and values from the rollout; the adapter merged into the weights while sampling; a LoRA update without
gradients for frozen weights. A multiply-add is two FLOPs. Only matrix products and attention are counted.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.ppo.workload import LORA, Shape, set_threads, synchronise

BEST_OF_SECONDS = 1.5
SIDES = {"cpu": (2048, 4096), "cuda": (4096, 8192)}  # of the products that are timed
PHASES = ("prefill", "decode", "reference", "reward", "optimise")


@dataclass(frozen=True)
class Rates:
    """The machine's best FLOPs per second of matrix products, and by which route, and bytes per second of memory."""

    flops: float
    bytes: float
    route: str
    precision: str

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "fp32" else 2


def attention_flops(shape: Shape, start: int, stop: int) -> int:
    """Count forward FLOPs of causal attention in all layers for queries at positions start ... stop - 1.

    Each query attends to itself and all earlier positions, in one product with the keys and one with the values.
    """
    attended = (stop * (stop + 1) - start * (start + 1)) // 2
    return shape.layers * 4 * shape.width * attended


def body_weights(shape: Shape) -> int:
    """Count the weights in the matrix products of all layers."""
    return shape.layers * shape.width * (2 * shape.width + 2 * shape.key_width + 3 * shape.intermediate)


def flops(shape: Shape, lengths: list[int]) -> dict[str, float]:
    """Count the FLOPs of each phase of a step with prompts of these lengths."""
    rows, response = len(lengths), shape.response
    token, head = 2 * body_weights(shape), 2 * shape.width * shape.vocabulary
    tokens = sum(lengths) + rows * response
    prompt_attention = sum(attention_flops(shape, 0, length) for length in lengths)
    decode_attention = sum(attention_flops(shape, length, length + response - 1) for length in lengths)
    attention = sum(attention_flops(shape, 0, length + response) for length in lengths)
    outputs = {"q_proj": shape.width, "v_proj": shape.key_width}
    lora = tokens * shape.layers * 2 * LORA["r"] * sum(shape.width + outputs[name] for name in LORA["target_modules"])
    products = tokens * token + rows * response * head
    return {
        "prefill": sum(lengths) * token + rows * head + prompt_attention,
        "decode": rows * (response - 1) * (token + head) + decode_attention,
        "reference": products + attention,
        "reward": tokens * token + attention,
        # forward and input gradients; attention's backward is twice its forward, and so is the adapter's
        "optimise": shape.epochs * (2 * products + 3 * attention + 3 * lora),
    }


def decode_bytes(shape: Shape, lengths: list[int], itemsize: int) -> float:
    """Count the bytes that decoding reads: per token step all weights, and each row's keys and values so far."""
    weights = body_weights(shape) + shape.width * shape.vocabulary
    steps = shape.response - 1
    cached = sum(steps * length + steps * (steps + 1) // 2 for length in lengths)
    return itemsize * (steps * weights + 2 * shape.layers * shape.key_width * cached)


def floor_seconds(shape: Shape, lengths: list[int], rates: Rates) -> dict[str, float]:
    """Compute the floor of each phase. Decoding takes the longer of its products and its reads, which can overlap."""
    floor = {phase: count / rates.flops for phase, count in flops(shape, lengths).items()}
    floor["decode"] = max(floor["decode"], decode_bytes(shape, lengths, rates.itemsize) / rates.bytes)
    return floor


def matmul_routes(precision: str) -> dict[str, Callable]:
    """List ways to compute the product of x [m, k] and w [n, k]."""
    import torch
    if torch.cuda.is_available() or precision != "fp32":
        return {"linear": torch.nn.functional.linear}
    functions = {"mm": lambda x, w: torch.mm(x, w.t())}
    if torch.backends.mkldnn.is_available():
        functions["mkldnn linear"] = lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return functions


def best_seconds(work: Callable) -> float:
    """Time the fastest call within BEST_OF_SECONDS, as others share the machine; in CPU seconds on one thread."""
    import torch
    one_thread = not torch.cuda.is_available() and torch.get_num_threads() == 1
    clock = time.process_time if one_thread else time.perf_counter
    work()
    best, end = float("inf"), time.perf_counter() + BEST_OF_SECONDS
    while time.perf_counter() < end:
        synchronise()
        start = clock()
        work()
        synchronise()
        best = min(best, clock() - start)
    return best


def measure_rates(precision: str) -> Rates:
    """Measure square products of 2048 and 4096 (8192 on an accelerator) by each route, and a sum and a copy."""
    import torch
    accelerated = torch.cuda.is_available()
    where, dtype = "cuda" if accelerated else "cpu", torch.float32 if precision == "fp32" else torch.bfloat16
    rates = {}
    with torch.no_grad():
        for side in SIDES[where]:
            x, w = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
            for name, route in matmul_routes(precision).items():
                rates[f"{name}, {side}"] = 2 * side ** 3 / best_seconds(lambda route=route, x=x, w=w: route(x, w))
        source = torch.randn((1 << 30 if accelerated else 1 << 26), device=where)
        target = torch.empty_like(source)
        size = source.numel() * source.element_size()
        memory = max(size / best_seconds(source.sum), 2 * size / best_seconds(lambda: target.copy_(source)))
    route = max(rates, key=rates.get)
    return Rates(rates[route], memory, route, precision)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precision", choices=("fp32", "bf16", "mixed"), default="fp32")
    set_threads()
    print(json.dumps(asdict(measure_rates(parser.parse_args().precision))))


if __name__ == "__main__":
    main()
