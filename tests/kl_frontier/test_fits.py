"""Fits of Gao et al.'s forms: known parameters, peaks."""

import numpy as np
import pytest

from stages.kl_frontier import fits

DISTANCE = np.sqrt([0.2, 0.6, 1.2, 1.8, 2.5, 3.2])


@pytest.mark.parametrize("form", fits.FORMS)
def test_the_parameters_that_the_data_were_made_from_come_back(form):
    gain = {"best_of_n": DISTANCE * (1.5 - 0.4 * DISTANCE), "rl": DISTANCE * (1.5 - 0.4 * np.log(DISTANCE))}[form]
    fitted = fits.fit(form, DISTANCE, gain)
    assert (fitted["a"], fitted["b"]) == pytest.approx((1.5, 0.4))
    assert fits.evaluate_fit(form, 1.5, 0.4, DISTANCE) == pytest.approx(gain)


@pytest.mark.parametrize("form", fits.FORMS)
def test_parameters_are_those_of_least_squares(form):
    bend = DISTANCE if form == "best_of_n" else np.log(DISTANCE)
    gain = DISTANCE * (1.5 - 0.4 * bend) + np.random.default_rng(0).normal(0, 0.05, len(DISTANCE))
    solution, *_ = np.linalg.lstsq(np.stack([DISTANCE, -DISTANCE * bend], 1), gain, rcond=None)
    assert list(fits.fit(form, DISTANCE, gain).values()) == pytest.approx(solution)


@pytest.mark.parametrize("form", fits.FORMS)
@pytest.mark.parametrize(("a", "b"), [(1.5, 0.4), (0.3, 0.6)])
def test_the_peak_is_where_a_grid_finds_it(form, a, b):
    grid = np.linspace(1e-4, 30, 1_000_000)
    gains = fits.evaluate_fit(form, a, b, grid)
    assert fits.peak_distance(form, a, b) == pytest.approx(grid[gains.argmax()], abs=1e-4)
    assert fits.peak_gain(form, a, b) == pytest.approx(gains.max())


@pytest.mark.parametrize(("form", "a", "b"), [("best_of_n", 1, 0), ("best_of_n", 1, -1), ("best_of_n", -1, 1),
                                              ("rl", 1, 0), ("rl", 1, -0.1), ("rl", 1, 1e-5)])
def test_a_curve_that_does_not_bend_down_has_no_peak(form, a, b):
    assert np.isnan(fits.peak_distance(form, a, b))


@pytest.mark.parametrize("distance", [[1, 2], [1, 1, 1], [0, 1, 2]])
def test_no_fit_where_two_parameters_are_not_determined(distance):
    assert not fits.is_determined("rl", np.array(distance, float))
    assert fits.is_determined("rl", np.array([1.0, 2, 3]))
