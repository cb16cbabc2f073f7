"""Interpolation along a family's own points."""

import pytest

from stages.kl_frontier.fits import interpolation_weights

CURVE = {"far": 3.0, "near": 1.0}  # in no order


@pytest.mark.parametrize(("at", "weights"), [
    (2.0, {"near": 0.5, "far": 0.5}), (0.25, {"near": 0.25}), (3.0, {"far": 1}), (1.0, {"near": 1}), (0.0, {}),
    (1.5, {"near": 0.75, "far": 0.25})])
def test_weights_are_linear_in_the_distance_and_sft_is_at_0(at, weights):
    assert interpolation_weights(CURVE, at) == pytest.approx(weights)


@pytest.mark.parametrize(("curve", "at"), [(CURVE, 3.01), ({"only": 3.0}, 1.0), ({}, 1.0)])
def test_nothing_outside_a_curves_range_and_one_policy_is_no_curve(curve, at):
    assert interpolation_weights(curve, at) is None


def test_two_policies_of_equal_kl_do_no_harm():
    weights = interpolation_weights({"a": 1.0, "b": 1.0, "c": 2.0}, 1.0)
    assert sum(weights.values()) == pytest.approx(1)
