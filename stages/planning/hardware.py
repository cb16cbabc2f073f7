"""Know what a machine computes: published rates of common cards, or measured ones of this processor.

A processor's thread is measured by its own CPU time, so that other processes hardly matter, and counted for each core.
"""

import os
import platform
import subprocess
import time
from collections.abc import Callable
from typing import NamedTuple

from stages.runtime.environment import processor_has_bf16_products
from stages.runtime.processes import stage_threads

GIB = 1 << 30
PUBLISHED_SHARE = 0.4  # of its published rates that a card reaches; an assumption
MEASURED_SHARE = 0.5  # of measured rates that the trainings of the bundled site reached, 0.33 to 0.71 by stage
USABLE_SHARE = 0.9  # of a card's memory: the rest is for CUDA's context and the allocator's fragments
SECONDS = 0.3  # of each measurement
WIDTH, COPIED_BYTES = 1024, 1 << 26  # of square matrices; of a tensor that no cache holds


class Card(NamedTuple):
    """A card: memory in GiB, 10^12 floating-point operations a second in bf16 without sparsity, GB a second.

    fp32_tflops: of a processor, which is planned with its own rate in fp32; None: that of bf16.
    """

    name: str
    memory_gib: float
    tflops: float
    bandwidth_gb_s: float
    fp32_tflops: float | None = None


# Memory, dense bf16 products and bandwidth, from the makers' pages.
CARDS = (
    Card("H200", 141, 989, 4800),
    Card("H100", 80, 989, 3350),
    Card("A100-80", 80, 312, 2039),
    Card("A100-40", 40, 312, 1555),
    Card("L40S", 48, 362, 864),
    Card("A6000", 48, 155, 768),
    Card("4090", 24, 165, 1008),
    Card("A10", 24, 125, 600),
    Card("3090", 24, 71, 936),
    Card("L4", 24, 121, 300),
)


class Hardware(NamedTuple):
    """The cards, and the share of their rates that is reached."""

    card: Card
    devices: int
    share: float

    @property
    def is_processor(self) -> bool:
        """Tell whether it is a machine without a card."""
        return self.card.fp32_tflops is not None

    def compute_seconds(self, flops: float, precision: str | None) -> float:
        """Return the seconds of so many operations, shared among the cards; precision: of the stage, None: fp32."""
        is_fp32 = precision in (None, "fp32")
        tflops = (self.card.fp32_tflops if is_fp32 else None) or self.card.tflops
        return flops / (tflops * 1e12 * self.share * self.devices)

    def read_seconds(self, read_bytes: float) -> float:
        """Return the seconds in which one card reads so many bytes of its memory."""
        return read_bytes / (self.card.bandwidth_gb_s * 1e9 * self.share)


def choose_hardware(name: str | None, memory_gib: float | None, tflops: float | None, devices: int | None,
                    share: float | None) -> Hardware:
    """Return the cards that are named, or those of this machine; ValueError, in one line, for what cannot be.

    share: of the rates; None: PUBLISHED_SHARE, or MEASURED_SHARE of a processor's.
    """
    for option, value in (("--device-memory-gib", memory_gib), ("--device-tflops", tflops), ("--devices", devices)):
        if value is not None and not value > 0:
            raise ValueError(f"{option} must be above 0, not {value:g}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--model-flops-share must be above 0 and at most 1, not {share:g}")
    here = list_cards() if name is None and memory_gib is None else []
    card = choose_card(name, memory_gib, here)
    card = card._replace(memory_gib=memory_gib or card.memory_gib, tflops=tflops or card.tflops)
    return Hardware(card, devices or max(1, len(here)),
                    share or (MEASURED_SHARE if card.fp32_tflops else PUBLISHED_SHARE))


def choose_card(name: str | None, memory_gib: float | None, here: list[tuple[str, float]]) -> Card:
    """Return the named card, the first in CARDS of at least that memory or, with nothing given, this machine's.

    here: name and GiB of this machine's cards; without one, the processor is measured. ValueError for an unknown name.
    """
    if name is not None:
        named = [card for card in CARDS if card.name.lower() == name.lower()]
        if not named:
            raise ValueError(f"--device {name}: unknown; choose one of {', '.join(card.name for card in CARDS)}, or "
                             f"give --device-memory-gib and --device-tflops")
        return named[0]
    if memory_gib is not None:
        fitting = [card for card in CARDS if card.memory_gib >= memory_gib]
        return min(fitting or CARDS[:1], key=lambda card: (card.memory_gib, -card.tflops))
    if not here:
        return measure_processor()
    own_name, own_gib = here[0]
    alike = [card for card in CARDS if card.name.split("-")[0].lower() in own_name.lower()]
    if not alike:
        raise ValueError(f"the rates of {own_name} are not known: give --device with the name of one like it")
    return alike[0]._replace(name=own_name, memory_gib=own_gib)


def list_cards() -> list[tuple[str, float]]:
    """List name and memory in GiB of this machine's cards, by the driver's program: importing torch takes seconds."""
    words = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(words, capture_output=True, text=True, timeout=10, check=True).stdout.splitlines()
        return [(name, float(mib) / 1024) for name, mib in (line.rsplit(", ", 1) for line in lines)]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


def measure_processor() -> Card:
    """Measure the rates of fp32 and bf16 matrix products, and of copies, whose rate the cores share.

    A stage's threads are planned: OMP_NUM_THREADS, which Snakemake sets for each rule, or all cores.
    Without bf16 in hardware its rate is that of fp32, in which such a stage is computed (runtime/environment.py).
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # read at the import
    import numpy as np

    cores = min(stage_threads(), len(os.sched_getaffinity(0)))
    matrix = np.ones((WIDTH, WIDTH), np.float32)
    fp32 = bf16 = cores * 2 * WIDTH**3 / _cpu_seconds(lambda: matrix @ matrix) / 1e12
    if processor_has_bf16_products():
        import torch

        torch.set_num_threads(1)
        tensor = torch.ones(WIDTH, WIDTH, dtype=torch.bfloat16)
        bf16 = cores * 2 * WIDTH**3 / _cpu_seconds(lambda: tensor @ tensor) / 1e12
    source, target = np.ones((2, COPIED_BYTES), np.uint8)
    copied = 2 * COPIED_BYTES / _cpu_seconds(lambda: np.copyto(target, source)) / 1e9  # read and written
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    return Card(f"{cores} cores, {platform.machine()}, measured", memory_gib, bf16, copied, fp32)


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU seconds of one call; the first call does not count."""
    work()
    times, end = [], time.perf_counter() + SECONDS
    while not times or time.perf_counter() < end:
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)
