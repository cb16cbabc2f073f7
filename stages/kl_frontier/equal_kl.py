"""Interpolate the gain of a family of policies at another policy's KL, along the family's own points."""

import numpy as np

MIN_CURVE_POINTS = 2  # beside SFT, at distance 0: a single policy is no curve


def interpolation_weights(distances: dict[str, float], at: float) -> dict[str, float] | None:
    """Return the weights of the policies whose sum of gains is the gain at distance `at`; None outside their range.

    Linear in sqrt(KL) between neighbours. SFT, with no gain, is at 0: its weight is left out, so weights may sum to
    less than 1.

    Args:
        distances: of the policies to SFT, sqrt(KL).
    """
    if len(distances) < MIN_CURVE_POINTS or not 0 <= at <= max(distances.values()):
        return None
    names = sorted(distances, key=distances.get)
    places = np.array([0.0, *(distances[name] for name in names)])
    right = max(1, int(np.searchsorted(places, at)))
    width = places[right] - places[right - 1]
    share = (at - places[right - 1]) / width if width else 1.0
    weights = dict(zip(["sft", *names], np.zeros(len(places)), strict=True))
    for index, weight in ((right - 1, 1 - share), (right, share)):
        weights[["sft", *names][index]] = float(weight)
    return {name: weight for name, weight in weights.items() if weight and name != "sft"}
