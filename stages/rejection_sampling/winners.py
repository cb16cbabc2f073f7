"""Choose the sampled responses that expert iteration learns from. Shapes: P prompts, n responses to each."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import numpy as np

from stages.rejection_sampling.candidates import Candidates


def choose_winners(
    rewards: np.ndarray, distinct: np.ndarray, keep: Literal["best", "above", "share"], keep_above: float | None,
    keep_share: float | None,
) -> np.ndarray:
    """Mark the responses to learn from, [P, n]; settings are named as in the recipe's section `expert_iteration`.

    distinct: marks one of equal responses to a prompt, [P, n]. ValueError if no response is left.
    """
    if keep == "best":  # of equal rewards the first
        return np.arange(rewards.shape[1]) == rewards.argmax(1)[:, None]
    if keep == "above":
        chosen = distinct & (rewards > keep_above)
        if not chosen.any():
            raise ValueError(f"no sampled response has a reward above keep_above ({keep_above:g}): the highest is "
                             f"{rewards.max():.4g}; lower keep_above, or set keep to best")
        return chosen
    ranked = np.argsort(np.where(distinct, -rewards, np.inf), axis=None, kind="stable")
    chosen = np.zeros(rewards.size, bool)
    chosen[ranked[: max(1, round(keep_share * distinct.sum()))]] = True
    return chosen.reshape(rewards.shape)


def list_winners(prompts: list[list[int]], parts: Iterable[Candidates], chosen: np.ndarray
                 ) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (prompt, response) of the marked responses; chosen: [P, n]. A response that was cut off has no EOS."""
    rows = zip(prompts, chosen, strict=True)
    for part in parts:
        for (prompt, marks), responses in zip(islice(rows, len(part.responses)), part.responses, strict=True):
            yield from ((prompt, responses[i]) for i in np.flatnonzero(marks))
