"""Measure what a machine without a card computes, to plan a run on its processor.

One thread is measured by its own CPU time, so that other processes hardly matter, and counted for every core.
"""

import os
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig

from stages.modeling.cpu_kernels.layers import replace_layers
from stages.modeling.load import resolve_cpu_kernels
from stages.modeling.lora import unwrap_peft
from stages.modeling.packed.forward import use_packed_attention
from stages.planning import shapes, steps
from stages.planning.dry_run import dry_run
from stages.planning.stage_plan import Card, Hardware, preset_gradients

GIB = 1 << 30
SECONDS = 0.4  # of each measurement
WIDTH, COPIED_BYTES = 1024, 1 << 27  # of square matrices; of a tensor that no cache holds
STEP_TOKENS = 512  # of the step that is timed, at most
ANY_WEIGHT = 0.01


def measure_processor() -> Card:
    """Measure the rates of matrix products in bf16 and fp32, and of copies, whose rate the cores share."""
    cores = len(os.sched_getaffinity(0))
    products = {}
    for dtype in (torch.bfloat16, torch.float32):
        matrix = torch.ones(WIDTH, WIDTH, dtype=dtype)
        products[dtype] = cores * 2 * WIDTH**3 / _cpu_seconds(lambda matrix=matrix: matrix @ matrix) / 1e12
    source, target = torch.zeros(2, COPIED_BYTES, dtype=torch.uint8)
    copied = 2 * COPIED_BYTES / _cpu_seconds(lambda: target.copy_(source)) / 1e9  # read and written
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return Card(f"{cores} cores, {platform.machine()}, measured", memory_gib, products[torch.bfloat16], copied,
                products[torch.float32])


def measure_share(config: PretrainedConfig, settings: Any, hardware: Hardware) -> float:
    """Return the share of the product rate that a training step of the base reaches.

    Two periods of its layers are measured. settings: the section sft.
    """
    settings = replace(settings, sequence_length_tokens=min(STEP_TOKENS, settings.sequence_length_tokens))
    period = min(2 * shapes.layer_period(config), config.num_hidden_layers)
    step = steps.lm_step(shapes.with_layers(config, period), settings, 1)
    flops = dry_run(step.run).flops
    model = step.model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(ANY_WEIGHT)
    if resolve_cpu_kernels(settings.cpu_kernels):
        use_packed_attention(unwrap_peft(model), cpu_kernels=True)
        replace_layers(model)
    preset_gradients(model)
    full = hardware._replace(share=1.0, devices=1)
    cores = len(os.sched_getaffinity(0))
    return min(1.0, full.compute_seconds(flops, settings.precision) * cores / _cpu_seconds(step.run))


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call with one thread; the first call, which may compile, does not count."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    work()
    times, end = [], time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    torch.set_num_threads(threads)
    return min(times)
