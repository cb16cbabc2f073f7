"""The least that a PPO step can take: FLOPs and bytes that it needs, over what this machine reaches.

    python -m benchmarks.ppo.flop_floor --precision fp32

Needed: every token once and no pads; logits of responses only (and one a prompt, to start it); old log-probabilities
and values kept from the rollout; the adapter merged into the weights while sampling; a LoRA update whose frozen weights
get no gradient. A multiply and an add are two FLOPs. Only matrix products and attention are counted.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

from benchmarks.ppo.workload import LORA, Shape, synchronise, threads

BEST_OF_SECONDS = 1.5
PHASES = ("prefill", "decode", "reference", "reward", "optimise")


@dataclass(frozen=True)
class Rates:
    """The machine's best: FLOPs a second of matrix products, and the route that gave it; bytes a second of memory."""

    flops: float
    bytes: float
    route: str
    precision: str

    @property
    def itemsize(self) -> int:
        return 4 if self.precision == "fp32" else 2


def attention_flops(shape: Shape, start: int, stop: int) -> int:
    """Forward FLOPs of all layers' causal attention for queries at positions start ... stop - 1: each meets itself and
    all before it, once with the keys and once with the values."""
    met = (stop * (stop + 1) - start * (start + 1)) // 2
    return shape.layers * 4 * shape.width * met


def body_weights(shape: Shape) -> int:
    """Weights in the matrix products of all layers."""
    return shape.layers * (4 * shape.width ** 2 + 3 * shape.width * shape.intermediate)


def flops(shape: Shape, lengths: list[int]) -> dict[str, float]:
    """FLOPs of each phase of a step with prompts of these lengths."""
    rows, response = len(lengths), shape.response
    token, head = 2 * body_weights(shape), 2 * shape.width * shape.vocabulary
    tokens = sum(lengths) + rows * response
    prompt_attention = sum(attention_flops(shape, 0, length) for length in lengths)
    decode_attention = sum(attention_flops(shape, length, length + response - 1) for length in lengths)
    attention = sum(attention_flops(shape, 0, length + response) for length in lengths)
    lora = tokens * shape.layers * len(LORA["target_modules"]) * 2 * 2 * LORA["r"] * shape.width
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
    """What decoding reads: all weights for every token step, and every row's keys and values so far."""
    weights = body_weights(shape) + shape.width * shape.vocabulary
    steps = shape.response - 1
    met = sum(steps * length + steps * (steps + 1) // 2 for length in lengths)
    return itemsize * (steps * weights + 2 * shape.layers * shape.width * met)


def seconds(shape: Shape, lengths: list[int], rates: Rates) -> dict[str, float]:
    """The floor of each phase. Decoding takes its products or its reading, whichever is longer: they can overlap."""
    found = {phase: count / rates.flops for phase, count in flops(shape, lengths).items()}
    found["decode"] = max(found["decode"], decode_bytes(shape, lengths, rates.itemsize) / rates.bytes)
    return found


def routes(precision: str) -> dict[str, Callable]:
    """Ways to the product of x [m, k] and w [n, k]."""
    import torch
    if torch.cuda.is_available() or precision != "fp32":
        return {"linear": torch.nn.functional.linear}
    found = {"mm": lambda x, w: torch.mm(x, w.t())}
    if torch.backends.mkldnn.is_available():
        found["mkldnn linear"] = lambda x, w: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
    return found


def best_seconds(work: Callable) -> float:
    """Least seconds of one call, in BEST_OF_SECONDS of calls: others share the machine. CPU seconds of one thread."""
    import torch
    one = not torch.cuda.is_available() and torch.get_num_threads() == 1
    clock = time.process_time if one else time.perf_counter
    work()
    best, end = float("inf"), time.perf_counter() + BEST_OF_SECONDS
    while time.perf_counter() < end:
        synchronise()
        start = clock()
        work()
        synchronise()
        best = min(best, clock() - start)
    return best


def measure(precision: str) -> Rates:
    """Square products of 2048 and 4096 (8192 on an accelerator) by every route; a sum over, and a copy of, 256 MiB."""
    import torch
    accelerated = torch.cuda.is_available()
    where, dtype = "cuda" if accelerated else "cpu", torch.float32 if precision == "fp32" else torch.bfloat16
    rates = {}
    with torch.no_grad():
        for side in (4096, 8192) if accelerated else (2048, 4096):
            x, w = (torch.randn(side, side, device=where).to(dtype) for _ in range(2))
            for name, route in routes(precision).items():
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
    threads()
    print(json.dumps(asdict(measure(parser.parse_args().precision))))


if __name__ == "__main__":
    main()
