"""The climb itself, on objectives whose largest value in a ball is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from scipy.optimize import brentq
from torch import Tensor

from hf_geosharp.geometry.metrics import EuclideanFrame
from hf_geosharp.geometry.space import Part, Space, Tangent, Vector
from hf_geosharp.sharpness.ascent import Climb, Wanted, auto_pgd, average, checkpoints, is_wanted


def plain_space(*sizes: int, dtype: torch.dtype = torch.float64) -> Space:
    """A flat space of several parts."""
    parts = [
        Part(f"part {i}", EuclideanFrame(torch.zeros(1, n, dtype=dtype)), ((1, n),), False, "first")
        for i, n in enumerate(sizes)
    ]
    return Space(parts, dtype, torch.device("cpu"))


class Counted:
    """f and its gradient, with everything that was asked of them."""

    def __init__(self, f: Callable[[Tensor], Tensor]) -> None:
        self.f = f
        self.points: list[Tensor] = []
        self.wanted: list[bool] = []

    def __call__(self, u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
        assert isinstance(u, Tangent)
        self.points.append(u.flat())
        x = u.flat().requires_grad_(bool(gradient))
        value = self.f(x)
        self.wanted.append(is_wanted(gradient, float(value.detach())))
        if not self.wanted[-1]:
            return float(value.detach()), None
        return float(value.detach()), like(u, torch.autograd.grad(value, x)[0])


def like(u: Tangent, flat: Tensor) -> Tangent:
    """These coordinates in pieces like those of u."""
    return Tangent(flat.split([p.numel() for p in u.pieces]))


def quadratic(seed: int, n: int, *, slope: float = 1.0, shift: float = 0.0) -> tuple[Tensor, Tensor]:
    """A random symmetric matrix (eigenvalues of either sign around ``shift``) and a slope."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(n, n, generator=generator, dtype=torch.float64)
    g = torch.randn(n, generator=generator, dtype=torch.float64)
    return (a + a.T) / math.sqrt(2 * n) + shift * torch.eye(n, dtype=torch.float64), slope * g / g.norm()


def largest_in_ball(h: Tensor, g: Tensor, rho: float) -> float:
    """The global maximum of g·u + ½ uᵀHu for ‖u‖ <= rho, by the secular equation of the trust region."""
    values, vectors = torch.linalg.eigh(h)
    c = vectors.T @ g

    def length(multiplier: float) -> float:
        return float((c / (multiplier - values)).norm())

    top = float(values[-1])
    if top < 0 and length(0.0) <= rho:
        multiplier = 0.0
    else:
        low = max(top, 0.0)
        multiplier = brentq(lambda m: length(m) - rho, low + 1e-12, low + float(g.norm()) / rho + 1.0, xtol=1e-14)
    z = c / (multiplier - values)
    return float(c @ z + 0.5 * (values * z * z).sum())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.2, 0.0), (1.0, -3.0), (1.0, 2.0)])
def test_climb_reaches_the_maximum_of_a_quadratic_in_a_ball(seed: int, slope: float, shift: float) -> None:
    h, g = quadratic(seed, 12, slope=slope, shift=shift)
    exact = largest_in_ball(h, g, rho=0.7)
    climb = auto_pgd(plain_space(5, 7), Counted(lambda u: g @ u + 0.5 * u @ h @ u), 0.7, 60)
    assert 0.999 * exact <= climb.rise <= exact * (1 + 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rho", [1e-3, 0.3, 7.0])
def test_climb_of_a_linear_function_ends_where_its_gradient_meets_the_sphere(dtype: torch.dtype, rho: float) -> None:
    g = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    climb = auto_pgd(plain_space(20, 30, dtype=dtype), Counted(lambda u: g @ u), rho, 5)
    # The climb stays one rounding inside the sphere, and the sum of 50 products rounds as well.
    assert climb.rise == pytest.approx(rho * float(g.double().norm()), rel=20 * torch.finfo(dtype).eps)
    assert torch.allclose(
        climb.u.flat().double(), rho * g.double() / g.double().norm(), rtol=1e-5 if dtype.itemsize == 4 else 1e-13
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 1000, 3_000_000])
def test_no_point_of_a_climb_lies_outside_the_ball(dtype: torch.dtype, size: int) -> None:
    rho, steps = 0.3, 20 if size < 10_000 else 4
    evaluate = Counted(lambda u: u.square().sum() + u[0])
    space = plain_space(size, dtype=dtype)
    climb = auto_pgd(space, evaluate, rho, steps)
    # Sums of millions of float32 squares round in their seventh digit.
    slack = 1 + (1e-6 if size > 10_000 and dtype == torch.float32 else 0.0)
    assert max(float(u.double().norm()) for u in [*evaluate.points, climb.u.flat()]) <= rho * slack


@pytest.mark.parametrize("steps", [1, 2, 7, 20])
def test_climb_takes_one_evaluation_a_step_and_one_more_without_a_gradient(steps: int) -> None:
    h, g = quadratic(3, 8)
    evaluate = Counted(lambda u: g @ u + 0.5 * u @ h @ u)
    climb = auto_pgd(plain_space(8), evaluate, 1.0, steps)
    assert evaluate.wanted == [True] * steps + [False]
    assert climb.steps == steps
    assert len(climb.history) == steps + 1


@pytest.mark.parametrize("seed", range(5))
def test_climb_keeps_the_best_point_it_saw(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 30 * torch.randn(6, generator=generator, dtype=torch.float64)
    evaluate = Counted(lambda u: torch.sin(a * u).sum() + (3 * u[0]).cos())
    climb = auto_pgd(plain_space(6), evaluate, 1.0, 20)
    seen = [float(evaluate.f(u)) for u in evaluate.points]
    assert climb.base == seen[0]
    assert climb.rise == max(seen) - climb.base
    assert float(evaluate.f(climb.u.flat())) == max(seen)
    assert list(climb.history) == [max(seen[: k + 1]) - climb.base for k in range(len(seen))]


def by_the_book(f: Callable[[Tensor], Tensor], n: int, rho: float, steps: int) -> list[float]:
    """Best values of algorithm 1 of Auto-PGD, with plain vectors; a point without a finite value is a checkpoint."""

    def at(u: Tensor) -> tuple[float, Tensor]:
        x = u.clone().requires_grad_()
        value = f(x)
        return float(value.detach()), torch.autograd.grad(value, x)[0]

    def inside(u: Tensor) -> Tensor:
        return u * min(1.0, rho / float(u.norm()))

    x = old = best = torch.zeros(n, dtype=torch.float64)
    (value, g), eta = at(x), 2 * rho
    top, top_g, history = value, g, [value]
    mark, risen, held, kept = 0, 0, eta, top
    for k in range(1, steps + 1):
        share = 1.0 if x is old else 0.75
        z = inside(x + eta * g / g.norm())
        old, x = x, inside(x + share * (z - x) + (1 - share) * (x - old))
        last, (value, g) = value, at(x)
        good = math.isfinite(value)
        risen += good and value > last
        if good and value > top:
            top, top_g, best = value, g, x
        history.append(top)
        if k in (math.ceil(p * steps - 1e-9) for p in (0.22, 0.41, 0.57, 0.70, 0.80, 0.87, 0.93, 0.99)) or not good:
            halve = risen < 0.75 * (k - mark) or (eta == held and top == kept) or not good
            mark, risen, held, kept = k, 0, eta, top
            if halve:
                eta, x, old, value, g = eta / 2, best, best, top, top_g
    return history


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("limit", [math.inf, 0.5])
def test_climb_takes_the_steps_of_the_algorithm(seed: int, limit: float) -> None:
    """Also where they lead to points without a finite value. Measured: 9e-13, of functions that magnify rounding."""
    a = 5 * torch.randn(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def f(u: Tensor) -> Tensor:
        return torch.where(u[0] > limit, torch.nan, torch.sin(a * u + 1).sum() + 2 * u[0])

    climb = auto_pgd(plain_space(2, 4), Counted(f), 1.0, 60)
    assert climb.history == pytest.approx([x - climb.base for x in by_the_book(f, 6, 1.0, 60)], rel=1e-10)


def test_rise_is_zero_and_never_negative_at_a_maximum() -> None:
    climb = auto_pgd(plain_space(4), Counted(lambda u: 3.0 - u.square().sum()), 0.5, 20)
    assert climb.rise == 0.0
    assert not climb.u.flat().any()


@pytest.mark.parametrize("seed", range(4))
def test_warm_starts_make_the_rise_monotone_in_the_radius(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 8 * torch.randn(6, generator=generator, dtype=torch.float64)
    space, start, base, rises = plain_space(6), None, None, []
    for rho in (0.05, 0.1, 0.4, 1.0, 3.0):
        climb = auto_pgd(space, Counted(lambda u: torch.sin(a * u + 1).sum()), rho, 10, start=start, base=base)
        start, base = climb.u, climb.base
        rises.append(climb.rise)
    assert rises == sorted(rises)
    assert base == pytest.approx(6 * math.sin(1))


def test_checkpoints_of_twenty_steps_are_those_of_the_algorithm() -> None:
    assert checkpoints(20) == [5, 9, 12, 14, 16, 18, 19, 20]


@pytest.mark.parametrize("steps", [1, 3, 10, 100])
def test_checkpoints_are_ascending_steps(steps: int) -> None:
    marks = checkpoints(steps)
    assert marks == sorted(set(marks))
    assert all(1 <= m <= steps for m in marks)


def test_climb_leaves_a_stationary_point_in_a_seeded_direction() -> None:
    def climb(seed: int | None) -> Climb:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return auto_pgd(plain_space(5), Counted(lambda u: u.square().sum()), 0.5, 6, generator=generator)

    assert climb(None).rise == pytest.approx(0.25)
    assert torch.equal(climb(None).u.flat(), climb(None).u.flat())
    assert torch.equal(climb(7).u.flat(), climb(7).u.flat())
    assert not torch.equal(climb(7).u.flat(), climb(8).u.flat())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_choose_the_way_from_a_stationary_point(dtype: torch.dtype) -> None:
    """Two computations of one function differ in the rounding of a gradient that is zero."""

    def climb(noise: int) -> Climb:
        rounding = torch.finfo(dtype).eps * torch.randn(5, generator=torch.Generator().manual_seed(noise), dtype=dtype)
        weights = torch.arange(1.0, 6.0, dtype=dtype)
        evaluate = Counted(lambda u: (weights * u * u).sum() + rounding @ u)
        return auto_pgd(plain_space(5, dtype=dtype), evaluate, 0.1, 4, generator=torch.Generator().manual_seed(0))

    assert climb(1).rise == pytest.approx(climb(2).rise, rel=100 * torch.finfo(dtype).eps)


def test_climb_survives_points_without_a_finite_value_and_says_so() -> None:
    def f(u: Tensor) -> Tensor:
        return torch.where(u[0] > 0.5, math.nan, 1.0) * (u[0] + 0.1 * u[1])

    climb = auto_pgd(plain_space(2), Counted(f), 2.0, 20)
    assert not climb.finite
    assert math.isfinite(climb.rise)
    assert 0.4 < climb.rise <= 0.5 + 0.1 * 2.0
    assert auto_pgd(plain_space(2), Counted(lambda u: u.sum()), 2.0, 20).finite


def test_climb_survives_a_gradient_that_is_not_finite() -> None:
    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        flat = u.flat()
        return float(flat.sum()), like(u, torch.full_like(flat, math.nan)) if gradient else None

    climb = auto_pgd(plain_space(3), evaluate, 1.0, 10)
    assert bool(torch.isfinite(climb.u.flat()).all())
    assert climb.rise >= 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_climb_refuses_a_start_without_a_finite_value(value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        auto_pgd(plain_space(2), lambda u, gradient: (value, u), 1.0, 5)


def test_converged_means_that_the_last_quarter_of_the_steps_added_less_than_one_per_cent() -> None:
    def climb(*history: float) -> Climb:
        return Climb(Tangent((torch.zeros(1),)), history[-1], 0.0, history, True)

    assert climb(0.0, 0.5, 0.8, 0.995, 1.0).converged
    assert not climb(0.0, 0.5, 0.8, 0.98, 1.0).converged
    assert climb(0.0, *[1.0] * 14, 1.992, *[2.0] * 5).converged  # steps 15 to 20 of 20
    assert not climb(0.0, *[1.0] * 15, *[2.0] * 5).converged
    assert climb(0.0, 0.0, 0.0, 0.0, 0.0).converged
    assert not climb(0.0, 1.0, 1.0, 1.0).converged  # three steps are no evidence


def test_climb_reports_every_step_with_the_best_rise_so_far() -> None:
    told: list[tuple[int, float]] = []
    climb = auto_pgd(plain_space(3), Counted(lambda u: (5 * u).sin().sum()), 1.0, 9, report=lambda *a: told.append(a))
    assert told == list(enumerate(climb.history))[1:]


# ------------------------------------------------------------------------------------------------------- average


def test_average_draws_are_antithetic_pairs_of_the_mean_square_length_rho() -> None:
    evaluate = Counted(lambda u: u.sum())
    rho, draws = 0.7, 4000
    mean, last = average(plain_space(3, 7), evaluate, rho, draws, torch.Generator().manual_seed(0), base=0.0)
    points = torch.stack(evaluate.points)
    assert evaluate.wanted == [False] * draws
    assert torch.equal(points[1::2], -points[::2])
    assert torch.equal(last.flat(), points[-1])
    assert mean == pytest.approx(0.0, abs=1e-14)  # the pairs cancel a linear function, up to rounding
    squares = points[::2].square().sum(1)
    # ‖u‖² is rho²/n times chi-squared with n degrees: its standard deviation is rho² √(2/n).
    assert float(squares.mean()) == pytest.approx(rho**2, abs=4 * rho**2 * math.sqrt(2 / 10 / len(squares)))


def test_average_of_a_quadratic_is_its_mean_curvature() -> None:
    h, g = quadratic(1, 10, shift=1.0)
    rho, draws = 0.4, 8000
    mean, _ = average(
        plain_space(10),
        Counted(lambda u: 5 + g @ u + 0.5 * u @ h @ u),
        rho, draws, torch.Generator().manual_seed(3), base=5.0,
    )  # fmt: skip
    exact = rho**2 / (2 * 10) * float(h.trace())
    # Variance of ½ uᵀHu for u ~ N(0, rho²/n): ½ (rho²/n)² tr H²; half of the draws are independent.
    error = rho**2 / 10 * math.sqrt(0.5 * float((h @ h).trace()) / (draws / 2))
    assert mean == pytest.approx(exact, abs=4 * error)
    assert exact > 10 * error


def test_average_repeats_for_the_same_seed() -> None:
    def once(seed: int) -> float:
        generator = torch.Generator().manual_seed(seed)
        return average(plain_space(4), Counted(lambda u: u.exp().sum()), 1.0, 10, generator, base=4.0)[0]

    assert once(5) == once(5) != once(6)
