"""Published rates of common cards: memory, dense bf16 matrix products and memory bandwidth, from the makers' pages."""

import torch

from stages.planning.processor import measure_processor
from stages.planning.stage_plan import Card, Hardware

GIB = 1 << 30
PUBLISHED_SHARE = 0.4  # of its published rates that a card reaches; an assumption


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


def choose_hardware(name: str | None, memory_gib: float | None, tflops: float | None, devices: int | None,
                    share: float | None) -> Hardware:
    """Return the cards that are named, or those of this machine; ValueError, in one line, for what cannot be.

    share: of the rates; None: PUBLISHED_SHARE or, of a processor, to be measured.
    """
    for option, value in (("--device-memory-gib", memory_gib), ("--device-tflops", tflops), ("--devices", devices)):
        if value is not None and not value > 0:
            raise ValueError(f"{option} must be above 0, not {value:g}")
    if share is not None and not 0 < share <= 1:
        raise ValueError(f"--model-flops-share must be above 0 and at most 1, not {share:g}")
    here = torch.cuda.device_count() if name is None and memory_gib is None else 1
    card = choose_card(name, memory_gib, tflops)
    return Hardware(card, devices or max(1, here), share or (None if card.fp32_tflops else PUBLISHED_SHARE))


def choose_card(name: str | None, memory_gib: float | None, tflops: float | None) -> Card:
    """Return the named card, or the first in CARDS of at least that memory, with what is given in its place.

    Nothing given: this machine's card or, without one, its processor. Raises ValueError for an unknown name.
    """
    if name is not None:
        card = next((card for card in CARDS if card.name.lower() == name.lower()), None)
        if card is None:
            raise ValueError(f"--device {name}: unknown; choose one of {', '.join(card.name for card in CARDS)}, or "
                             f"give --device-memory-gib and --device-tflops")
    elif memory_gib is not None:
        fitting = [card for card in CARDS if card.memory_gib >= memory_gib]
        card = min(fitting or CARDS[:1], key=lambda card: (card.memory_gib, -card.tflops))
    else:
        card = _own_card()
    return card._replace(memory_gib=memory_gib or card.memory_gib, tflops=tflops or card.tflops)


def _own_card() -> Card:
    """Return this machine's card, with the rates of the card that its name contains, or its processor."""
    if not torch.cuda.is_available():
        return measure_processor()
    own = torch.cuda.get_device_properties(0)
    known = next((card for card in CARDS if card.name.split("-")[0].lower() in own.name.lower()), None)
    if known is None:
        raise ValueError(f"the rates of {own.name} are not known: give --device with the name of one like it")
    return known._replace(name=own.name, memory_gib=own.total_memory / GIB)
