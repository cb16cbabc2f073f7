"""Fit the gain of a family of policies to the distance from SFT, and interpolate between its policies.

The forms are those of Gao et al. 2022 (arXiv 2210.10760, equation 1).

With d = sqrt(KL): best-of-n R(d) = d (a - b d), reinforcement learning R(d) = d (a - b log d). Both are 0 at d = 0,
where SFT is, and linear in a and b. Shapes: P points.
"""

from collections.abc import Callable

import numpy as np

MIN_POINTS = 3  # two give any curve of two parameters
MIN_CURVE_POINTS = 2  # to interpolate between, beside SFT, at distance 0: a single policy is no curve
FORMS = {"best_of_n": "d (a − b d)", "rl": "d (a − b log d)"}


def design_matrix(form: str, distance: np.ndarray) -> np.ndarray:
    """Return the columns [..., 2] that a and b multiply; distance above 0."""
    distance = np.asarray(distance, float)
    return np.stack([distance, -distance * (distance if form == "best_of_n" else np.log(distance))], -1)


def solution_matrix(form: str, distance: np.ndarray) -> np.ndarray:
    """Return the matrix [2, P] that turns gains into the least-squares a and b."""
    return np.linalg.pinv(design_matrix(form, distance))


def is_determined(form: str, distance: np.ndarray) -> bool:
    """Check whether there are MIN_POINTS points at distances above 0, and two of them differ."""
    return (len(distance) >= MIN_POINTS and min(distance) > 0
            and np.linalg.matrix_rank(design_matrix(form, distance)) == 2)


def fit(form: str, distance: np.ndarray, gain: np.ndarray) -> dict[str, float]:
    """Fit a and b to points [P] by least squares. SFT, at the origin, is no point: both forms pass through it."""
    a, b = solution_matrix(form, distance) @ np.asarray(gain, float)
    return {"a": float(a), "b": float(b)}


def statistics_of_means(form: str, distance: np.ndarray) -> dict[str, Callable]:
    """Return what is estimated of a fit by name, as functions of the mean gains [P, ...] of its points."""
    solution = solution_matrix(form, distance)
    return {"a_by_question": lambda means: (solution @ means)[0], "b_by_question": lambda means: (solution @ means)[1],
            "peak_sqrt_kl": lambda means: peak_distance(form, *(solution @ means)),
            "peak_gain": lambda means: peak_gain(form, *(solution @ means)),
            "peak_exists": lambda means: np.isfinite(peak_distance(form, *(solution @ means))) * 1.0}


def evaluate_fit(form: str, a: float, b: float, distance: np.ndarray) -> np.ndarray:
    """Compute the fitted gain at distances above 0."""
    return design_matrix(form, distance) @ (a, b)


def peak_distance(form: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the distance of the highest fitted gain, where over-optimisation begins; NaN where there is none.

    There is one if the curve bends down (b above 0) and, of best-of-n, rises at first (a above 0).
    """
    a, b = np.asarray(a, float), np.asarray(b, float)
    with np.errstate(all="ignore"):
        peak = a / (2 * b) if form == "best_of_n" else np.exp(a / b - 1)
        return np.where((b > 0) & ((a > 0) | (form == "rl")) & np.isfinite(peak), peak, np.nan)


def peak_gain(form: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Compute the highest fitted gain; NaN where there is none."""
    peak = peak_distance(form, a, b)
    return peak * a / 2 if form == "best_of_n" else peak * b


def interpolation_weights(distances: dict[str, float], at: float) -> dict[str, float] | None:
    """Return the weights of the policies whose sum of gains is the gain at distance `at`; None outside their range.

    Linear in sqrt(KL) between neighbours. SFT, with no gain, is at 0: its weight is left out, so weights may sum to
    less than 1.

    Args:
        distances: of the policies to SFT, sqrt(KL).
    """
    if len(distances) < MIN_CURVE_POINTS or not 0 <= at <= max(distances.values()):
        return None
    names = ["sft", *sorted(distances, key=distances.get)]
    knots = np.array([0.0, *sorted(distances.values())])
    right = max(1, int(np.searchsorted(knots, at)))
    width = knots[right] - knots[right - 1]
    share = float((at - knots[right - 1]) / width) if width else 1.0
    weights = {names[right - 1]: 1 - share, names[right]: share}
    return {name: weight for name, weight in weights.items() if weight and name != "sft"}
