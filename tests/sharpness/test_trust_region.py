"""The small problem: against the secular equation, and many points drawn at random."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.trust_region import Array, Quadratic, largest_in_ball
from tests.sharpness.test_ascent import largest_in_ball as by_the_secular_equation
from tests.sharpness.test_ascent import like, plain_space, quadratic


def norm(x: Array) -> float:
    return float(np.linalg.norm(x))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shift", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("rho", [1e-3, 0.7, 30.0])
def test_the_maximum_in_a_ball_is_found_to_rounding(seed: int, shift: float, rho: float) -> None:
    h, g = quadratic(seed, 4, shift=shift)
    exact = by_the_secular_equation(h, g, rho)
    matrix, slope = h.numpy(), g.numpy()
    z = largest_in_ball(slope, matrix, rho, slope)
    assert norm(z) <= rho * (1 + 1e-14)
    assert float(slope @ z + 0.5 * z @ matrix @ z) == pytest.approx(exact, rel=1e-9)


def test_without_slope_it_lies_along_the_top_axis_or_stays() -> None:
    matrix = np.diag([1.0, 3.0, -2.0])
    zero = np.zeros(3)
    assert np.abs(largest_in_ball(zero, matrix, 0.5, zero)).tolist() == [0.0, 0.5, 0.0]
    assert not largest_in_ball(zero, matrix - 4 * np.eye(3), 0.5, zero).any()


@pytest.mark.parametrize("tiny", [1e-12, 1e-17, 1e-30, 1e-300])
def test_a_slope_along_the_top_axis_that_rounding_swallows(tiny: float) -> None:
    """Added to the eigenvalue it is gone, and nothing may be divided by the difference."""
    z = largest_in_ball(np.array([0.5, tiny]), np.diag([0.0, 3.0]), 1.0, np.array([0.0, 1.0]))
    assert z.tolist() == pytest.approx([1 / 6, math.sqrt(35) / 6])


def test_the_hard_case() -> None:
    """A slope without a part along the top axis that does not reach the sphere by itself."""
    matrix = np.diag([0.0, 2.0])
    for side in (1.0, -1.0):
        # Both are as good; the nearer one is taken, whatever rounding says.
        slope, near = np.array([[1.0, -1e-14 * side], [0.3, 0.2 * side]])
        z = largest_in_ball(slope, matrix, 1.0, near)
        assert z.tolist() == pytest.approx([0.5, side * math.sqrt(0.75)])


@pytest.mark.parametrize("top", [2.0, -1.0])
@pytest.mark.parametrize("seed", range(6))
def test_it_does_not_depend_on_the_axes_of_an_eigenvalue_that_is_there_twice(top: float, seed: int) -> None:
    """A slope that lies in their plane, and hardly along one of the axes that are found there."""
    generator = torch.Generator().manual_seed(seed)
    slope, near = torch.randn(2, 4, generator=generator, dtype=torch.float64).numpy()
    values = np.array([-5.0, top - 0.1, top, top])
    best = by_the_secular_equation(torch.diag(torch.from_numpy(values)), torch.from_numpy(slope), 0.7)
    found = []
    across = math.atan2(float(slope[2]), float(slope[3]))
    for angle in (0.0, 1.0, *(across + k * math.pi / 2 + d for k in range(4) for d in (0.0, 1e-4, -1e-4))):
        turn = np.eye(4)
        cos, sin = math.cos(angle), math.sin(angle)
        turn[2:, 2:] = [[cos, -sin], [sin, cos]]
        # Turning the plane leaves the matrix as it is but for rounding.
        z = largest_in_ball(slope, turn @ np.diag(values) @ turn.T, 0.7, near)
        assert float(slope @ z + 0.5 * z @ (values * z)) == pytest.approx(best, rel=1e-9)
        turned = turn.T @ largest_in_ball(turn @ slope, np.diag(values), 0.7, turn @ near)
        found += [z, turned]
    np.testing.assert_allclose(found, [found[0]] * len(found), rtol=0, atol=1e-9)


def model_around(center: Array, slope: Array, s: Array, y: Array) -> Quadratic:
    """A model whose second axis is s, with y = B s there."""
    vectors = np.stack([center, slope, s, y])
    space = plain_space(len(center))
    loss = float(slope @ s + y @ s / 2)
    tangents = tuple(like(space.zeros(), torch.from_numpy(v)) for v in vectors)
    return Quadratic(tangents, vectors @ vectors.T, 1e-10, loss, 0.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("longest", [0.01, 0.2, 0.7])
def test_a_step_that_must_not_be_long_is_the_best_of_those_that_are_not(seed: int, longest: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    center, slope, s, y = torch.randn(4, 6, generator=generator, dtype=torch.float64).numpy()
    model = model_around(center / norm(center), slope, s, 0.3 * y)
    z = model.within(longest, 0.0, 1.0)
    assert norm(z - model.center) == pytest.approx(longest, rel=1e-6)
    others = torch.randn(20_000, len(z), generator=generator, dtype=torch.float64).numpy()
    others = model.center + longest * others / np.maximum(np.linalg.norm(others, axis=1, keepdims=True), 1.0)
    others = others[np.linalg.norm(others, axis=1) <= 1.0]
    assert len(others) > 1000
    steps = others - model.center
    gains = steps @ model.slope + ((steps @ model.hessian) * steps).sum(1) / 2
    assert float(gains.max()) <= model.gain(z)[0] * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_how_long_a_step_is_for_a_sigma_is_known_without_the_step(seed: int) -> None:
    """Inside the ball and on the sphere, and where both sides of the top axis are as good."""
    generator = torch.Generator().manual_seed(seed)
    center, slope, s, y = torch.randn(4, 6, generator=generator, dtype=torch.float64).numpy()
    tied = np.eye(6)[:2]
    for model in (
        model_around(center / norm(center), slope, s, 0.3 * y),
        model_around(tied[0], tied[0], tied[1], 5 * tied[1]),
    ):
        for rho in (1.0, 1.7):
            length = model.lengths(rho)
            for sigma in (0.0, 1e-3, 0.4, 3.0, 50.0, 1e4):
                measured = norm(model.largest(sigma, rho) - model.center)
                assert length(sigma) == pytest.approx(measured, rel=1e-9, abs=1e-12)


def test_where_only_a_leap_is_better_a_step_goes_some_of_the_way() -> None:
    """The slope points outwards at a point of the sphere, and the loss is curved most across it."""
    center, s = np.eye(4)[:2]
    model = model_around(center, center, s, 5 * s)
    z = model.within(0.3, 0.0, 1.0)
    assert norm(z - model.center) == pytest.approx(0.3)
    assert norm(z) <= 1.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("rho", [0.1, 2.0])
def test_how_much_it_bends_along_the_sphere_is_its_second_derivative_on_great_circles(seed: int, rho: float) -> None:
    """Over 20,000 circles through the center; a slope that presses outwards leaves it that much less curvature."""
    generator = torch.Generator().manual_seed(seed)
    center, slope, s, y = torch.randn(4, 6, generator=generator, dtype=torch.float64).numpy()
    center *= rho / norm(center)
    slope += (3 - slope @ center / rho) * center / rho
    model = model_around(center, slope, s, 0.3 * y)
    ways = torch.randn(20_000, len(model.center), generator=generator, dtype=torch.float64).numpy()
    ways -= (ways @ model.center)[:, None] * model.center / rho**2
    ways *= rho / np.linalg.norm(ways, axis=1, keepdims=True)
    small = 1e-3
    gains = []
    for t in (-small, small):
        steps = (math.cos(t) - 1) * model.center + math.sin(t) * ways
        gains.append(steps @ model.slope + ((steps @ model.hessian) * steps).sum(1) / 2)
    second = float(((gains[0] + gains[1]) / small**2).max())
    press = float(model.slope @ model.center)
    assert press == pytest.approx(3 * rho)
    assert press * (model.bend(rho) - 1) == pytest.approx(second, rel=0.02, abs=0.02 * press)


def test_it_bends_by_nothing_inside_the_ball_and_without_end_where_no_slope_presses_outwards() -> None:
    center, s = np.eye(4)[:2]
    assert model_around(center, center, s, 5 * s).bend(1.0) == pytest.approx(5)
    assert model_around(center, center, s, 5 * s).bend(2.0) == 0
    assert model_around(center, center, s, -5 * s).bend(1.0) == 0
    assert model_around(center, -center, s, 5 * s).bend(1.0) == math.inf
    assert model_around(0 * center, center, s, 5 * s).bend(1.0) == 0


def test_products_that_are_no_numbers_say_nothing() -> None:
    u = (Tangent((torch.ones(2),)),) * 4
    gram = np.array([[1.0, 0.5, 1, 1], [0.5, 1, 1, np.inf], [1, 1, 1, np.nan], [1, np.inf, np.nan, np.inf]])
    known = Quadratic(u, gram, 1e-10, 1.0, 0.0)
    assert len(known.vectors) == 2
    assert known.gain(known.largest(0.0, 1.0))[0] > 0
    nothing = Quadratic(u[:2], np.full((2, 2), np.nan), 1e-10, None, 0.0)
    assert nothing.gain(nothing.largest(0.0, 1.0)) == (0.0, 0.0)
