"""Published rates of common cards: memory, dense bf16 matrix products and memory bandwidth, from the makers' pages."""

from typing import NamedTuple

import torch

GIB = 1 << 30


class Card(NamedTuple):
    """A card: memory in GiB, 10^12 floating-point operations a second in bf16 without sparsity, GB a second."""

    name: str
    memory_gib: float
    tflops: float
    bandwidth_gb_s: float


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


def choose_card(name: str | None, memory_gib: float | None, tflops: float | None) -> Card:
    """Return the named card, or the first in CARDS of at least that memory, with what is given in its place.

    Raises ValueError for an unknown name, or if nothing is given and there is no card here.
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
    """Return this machine's card, with the rates of the card that its name contains."""
    if not torch.cuda.is_available():
        raise ValueError("there is no card here: give --device-memory-gib 24, or --device with a name: "
                         + ", ".join(card.name for card in CARDS))
    own = torch.cuda.get_device_properties(0)
    known = next((card for card in CARDS if card.name.split("-")[0].lower() in own.name.lower()), None)
    if known is None:
        raise ValueError(f"the rates of {own.name} are not known: give --device with the name of one like it")
    return known._replace(name=own.name, memory_gib=own.total_memory / GIB)
