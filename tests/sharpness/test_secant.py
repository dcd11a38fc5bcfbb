"""The secant ascent, on objectives whose largest value in a ball is known, and beside Auto-PGD on tiny models."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.geometry.metrics import PAIR_METRICS
from hf_geosharp.geometry.space import Part, Recipe, Space, Tangent, Vector
from hf_geosharp.sharpness.ascent import Climb, Wanted, auto_pgd, inside, is_wanted
from hf_geosharp.sharpness.secant import FLAT, GROW, SHRINK, SLOPE, SURE, TOLERANCE, _Walk, secant, settled
from tests.sharpness.test_ascent import Counted, like, plain_space, quadratic
from tests.sharpness.test_ascent import largest_in_ball as by_the_secular_equation
from tests.sharpness.tiny import bert, bert_batches, gpt2, gpt2_batches

# ------------------------------------------------------------------------------------------------------- quadratics


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("slope", "shift"), [(1.0, 0.0), (0.2, 0.0), (1.0, -3.0), (1.0, 2.0)])
def test_it_reaches_the_maximum_of_a_quadratic_in_a_ball(seed: int, slope: float, shift: float) -> None:
    """Slopes that decide and slopes that hardly matter, maxima inside (shift -3) and on the sphere."""
    h, g = quadratic(seed, 12, slope=slope, shift=shift)
    exact = by_the_secular_equation(h, g, rho=0.7)
    climb = secant(plain_space(5, 7), Counted(lambda u: g @ u + 0.5 * u @ h @ u), 0.7, 20)
    assert 0.998 * exact <= climb.rise <= exact * (1 + 1e-12)
    assert climb.stopped == "converged"
    assert climb.converged


@pytest.mark.parametrize("seed", range(4))
def test_from_a_stationary_point_it_finds_the_top_eigenvalue_faster_than_auto_pgd(seed: int) -> None:
    h, _ = quadratic(seed, 60, shift=2.0)
    exact = float(torch.linalg.eigvalsh(h)[-1]) / 2
    evaluate = Counted(lambda u: 0.5 * u @ h @ u)
    rises = [climb(plain_space(60), evaluate, 1.0, 20, stationary=True).rise for climb in (secant, auto_pgd)]
    assert 0.96 * exact < rises[0] <= exact * (1 + 1e-12)
    assert exact - rises[0] < 0.5 * (exact - rises[1])


def test_a_linear_function_takes_three_steps_at_most() -> None:
    """One gets there, and what follows adds nothing."""
    g = torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    climb = secant(plain_space(20, 30), Counted(lambda u: g @ u), 0.3, 20)
    assert climb.rise == pytest.approx(0.3 * float(g.norm()), rel=1e-13)
    assert torch.allclose(climb.u.flat(), 0.3 * g / g.norm(), rtol=1e-12)
    assert climb.steps <= 3
    assert climb.stopped == "converged"


# ------------------------------------------------------------------------------------------------------ other shapes


def exploding(u: Tensor) -> Tensor:
    """Convex, and far from quadratic in the ball."""
    return (4 * u).exp().sum()


def saturating(u: Tensor) -> Tensor:
    """Steep at first and then flat: the slope at the base point promises far too much."""
    return torch.tanh(20 * u[0]) + 0.1 * u.sum()


def oscillating(u: Tensor) -> Tensor:
    """A full-radius step along the gradient goes too far, to and fro."""
    return u[0] - 6 * (u[1] - 0.4 * u[0]).square() + 0.05 * u[2:].sum()


@pytest.mark.parametrize("f", [exploding, saturating, oscillating])
def test_it_agrees_with_a_long_auto_pgd_in_at_most_as_many_steps(f: Callable[[Tensor], Tensor]) -> None:
    # A start that is no symmetric point of any of them.
    a = torch.linspace(-0.2, 0.3, 6, dtype=torch.float64)
    climbs = [
        climb(plain_space(6), Counted(lambda u: f(u + 0.1 * a)), 1.0, n) for climb, n in ((secant, 20), (auto_pgd, 200))
    ]
    assert climbs[0].rise >= 0.995 * climbs[1].rise
    assert climbs[0].steps <= 20


@pytest.mark.parametrize("climb", [secant, auto_pgd])
@pytest.mark.parametrize("f", [exploding, saturating, oscillating])
@pytest.mark.parametrize(("loss", "radius"), [(2.0**-46, 1.0), (2.0**10, 2.0**-6), (1.0, 2.0**12)])
def test_units_of_loss_and_radius_change_nothing_to_the_last_bit(
    climb: Callable[..., Climb], f: Callable[[Tensor], Tensor], loss: float, radius: float
) -> None:
    """Powers of two, by which nothing is rounded."""
    a = torch.linspace(-0.2, 0.3, 6, dtype=torch.float64)
    usual = climb(plain_space(6), Counted(lambda u: f(u + 0.1 * a)), 1.0, 20)
    other = climb(plain_space(6), Counted(lambda u: loss * f(u / radius + 0.1 * a)), radius, 20)
    assert other.history == tuple(loss * rise for rise in usual.history)
    assert torch.equal(other.u.flat(), radius * usual.u.flat())
    assert other.stopped == usual.stopped


@pytest.mark.parametrize("seed", range(5))
def test_it_keeps_the_best_point_it_saw(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 30 * torch.randn(6, generator=generator, dtype=torch.float64)
    evaluate = Counted(lambda u: torch.sin(a * u).sum() + (3 * u[0]).cos())
    climb = secant(plain_space(6), evaluate, 1.0, 20)
    seen = [float(evaluate.f(u)) for u in evaluate.points]
    assert climb.base == seen[0]
    assert climb.rise == max(seen) - climb.base
    assert float(evaluate.f(climb.u.flat())) == max(seen)
    assert list(climb.history) == [max(seen[: k + 1]) - climb.base for k in range(len(seen))]


@pytest.mark.parametrize("seed", range(5))
def test_steps_grow_with_those_that_raised_the_loss_and_shrink_after_others(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 10 * torch.randn(6, generator=generator, dtype=torch.float64)
    evaluate = Counted(lambda u: torch.sin(a * u + 1).sum())
    secant(plain_space(6), evaluate, 1.0, 20)
    best, longest, failed = evaluate.points[0], math.inf, 0
    for u in evaluate.points[1:]:
        length = float((u - best).norm())
        assert length <= longest * (1 + 1e-6)
        if float(evaluate.f(u)) > float(evaluate.f(best)):
            best, longest = u, GROW * length
        else:
            longest, failed = SHRINK * length, failed + 1
    assert failed


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 1000, 3_000_000])
def test_no_point_lies_outside_the_ball(dtype: torch.dtype, size: int) -> None:
    rho, steps = 0.3, 20 if size < 10_000 else 4
    evaluate = Counted(lambda u: u.square().sum() + u[0])
    climb = secant(plain_space(size, dtype=dtype), evaluate, rho, steps)
    slack = 1 + (1e-6 if size > 10_000 and dtype == torch.float32 else 0.0)
    assert max(float(u.double().norm()) for u in [*evaluate.points, climb.u.flat()]) <= rho * slack


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_it_takes_at_most_one_evaluation_a_step_and_needs_no_gradient_of_the_last(steps: int) -> None:
    a = torch.linspace(1.0, 2.0, 8, dtype=torch.float64)
    evaluate = Counted(lambda u: (3 * a * u + a).sin().sum())
    climb = secant(plain_space(8), evaluate, 1.0, steps)
    assert evaluate.wanted == [True] * steps + [False]
    assert climb.steps == steps
    assert climb.stopped == "budget"


@pytest.mark.parametrize("f", [exploding, saturating, oscillating])
def test_once_something_is_known_of_a_step_only_better_points_have_a_gradient(f: Callable[[Tensor], Tensor]) -> None:
    evaluate = Counted(f)
    climb = secant(plain_space(6), evaluate, 1.0, 20)
    values = [float(f(u)) for u in evaluate.points]
    best = [value > max(values[:i], default=-math.inf) for i, value in enumerate(values)]
    # Of the first step something is learnt in any case; the last one that the steps allow needs no gradient.
    best[1] = True
    if climb.stopped == "budget":
        best[-1] = False
    assert evaluate.wanted == best


def test_what_is_given_is_not_evaluated_again() -> None:
    h, g = quadratic(3, 8)
    evaluate = Counted(lambda u: g @ u + 0.5 * u @ h @ u)
    space = plain_space(8)
    plain = secant(space, evaluate, 1.0, 6)
    count = len(evaluate.points)
    given = secant(space, evaluate, 1.0, 6, given=(0.0, like(space.zeros(), g.clone())))
    assert len(evaluate.points) - count == count - 1
    assert given.history == plain.history


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_end_is_one_of_the_points_seen_to_the_last_bit(dtype: torch.dtype) -> None:
    """While a point is evaluated few gradients of earlier ones are held."""
    held: weakref.WeakSet[Tensor] = weakref.WeakSet()
    seen: list[tuple[float, Tensor]] = []
    counts: list[int] = []
    h, g = (x.to(dtype) for x in quadratic(1, 8))

    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        x = u.flat()
        counts.append(len(held))
        y = x.clone().requires_grad_()
        value = g @ y + 0.5 * y @ h @ y - 2 * (y**4).sum()
        out = torch.autograd.grad(value, y)[0]
        seen.append((float(value.detach()), x.clone()))
        held.update([out])
        return seen[-1][0], Tangent((out,))

    climb = secant(plain_space(8, dtype=dtype), evaluate, 2.0, 20)
    best = max(seen, key=lambda pair: pair[0])
    assert len(seen) > 4
    assert torch.equal(climb.u.flat(), best[1])
    # Gradients of earlier points: those of the best one and of the last step, in which the change lies.
    assert max(counts) <= 3


def test_it_holds_no_more_than_six_tangent_vectors() -> None:
    """The point under evaluation and its gradient among them."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    counts = []
    h, g = quadratic(1, 8)

    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        x = u.flat().requires_grad_()
        value = g @ x + 0.5 * x @ h @ x - 2 * (x**4).sum()
        out = torch.autograd.grad(value, x)[0]
        alive.update([*u.pieces, out])
        counts.append(len(alive))
        return float(value.detach()), Tangent((out,))

    secant(plain_space(8), evaluate, 2.0, 20)
    assert len(counts) > 8
    assert max(counts) <= 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_in_a_large_space_points_are_not_kept_and_the_climb_is_the_same_to_the_last_bit(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    counts: list[int] = []
    kinds: set[type] = set()
    h, g = (x.to(dtype) for x in quadratic(1, 8))

    def evaluate(u: Vector, gradient: bool) -> tuple[float, Tangent | None]:
        kinds.add(type(u))
        x = u.piece(0).clone().requires_grad_()
        value = g @ x + 0.5 * x @ h @ x - 2 * (x**4).sum()
        out = torch.autograd.grad(value, x)[0]
        held = u.pieces if isinstance(u, Tangent) else [t for v, _ in u.terms for t in v.pieces]
        alive.update({id(t): t for t in (out, *held)})
        counts.append(len(alive))
        return float(value.detach()), Tangent((out,))

    space = plain_space(8, dtype=dtype)
    kept = secant(space, evaluate, 2.0, 20)
    assert kinds == {Tangent}
    counts.clear()
    alive.clear()
    monkeypatch.setattr("hf_geosharp.sharpness.secant.KEPT", 0)
    made = secant(space, evaluate, 2.0, 20)
    assert kinds == {Tangent, Recipe}
    assert made.history == kept.history
    assert torch.equal(made.u.flat(), kept.u.flat())
    # The four vectors of the climb, and the gradient of the point under evaluation.
    assert len(counts) > 8
    assert max(counts) <= 5


@pytest.mark.parametrize("f", [saturating, oscillating])
def test_while_it_is_asked_for_a_gradient_no_vector_is_made(
    f: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The activations of the forward pass are there then; where these leave no room, nobody could halve them."""
    monkeypatch.setattr("hf_geosharp.sharpness.secant.KEPT", 0)
    asking = False
    empty = Space.empty

    def watched(space: Space) -> Tangent:
        assert not asking
        return empty(space)

    monkeypatch.setattr(Space, "empty", watched)

    def evaluate(u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
        nonlocal asking
        x = u.piece(0).clone().requires_grad_()
        value = f(x)
        asking = True
        wanted = is_wanted(gradient, float(value.detach()))
        asking = False
        return float(value.detach()), Tangent((torch.autograd.grad(value, x)[0],)) if wanted else None

    assert secant(plain_space(6), evaluate, 1.0, 20).steps > 3


def test_in_a_large_space_a_better_point_takes_the_place_of_the_last_step_before_it_has_a_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gradient is as large as the model: beside it are the best point, the gradient there, and the better point."""
    monkeypatch.setattr("hf_geosharp.sharpness.secant.KEPT", 0)
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
    before: list[int] = []
    counts: list[int] = []
    h, g = quadratic(1, 8)

    def evaluate(u: Vector, gradient: Wanted) -> tuple[float, Tangent | None]:
        held = u.pieces if isinstance(u, Tangent) else [t for v, _ in u.terms for t in v.pieces]
        alive.update({id(t): t for t in held})
        del held
        before.append(len(alive))
        x = u.piece(0).clone().requires_grad_()
        value = g @ x + 0.5 * x @ h @ x - 2 * (x**4).sum()
        if not is_wanted(gradient, float(value.detach())):
            return float(value.detach()), None
        alive.update({id(t): t for t in (u.kept.pieces if isinstance(u, Recipe) and u.kept else ())})
        counts.append(len(alive))
        out = torch.autograd.grad(value, x)[0]
        alive[id(out)] = out
        return float(value.detach()), Tangent((out,))

    secant(plain_space(8), evaluate, 2.0, 20)
    assert len(counts) > 6
    assert max(before) == 4
    assert max(counts) == 3


# -------------------------------------------------------------------------------------------------------- degenerate


@pytest.mark.parametrize("begin", [0.0, 0.7])
@pytest.mark.parametrize("f", [exploding, saturating, oscillating])
def test_products_that_are_known_are_those_of_the_vectors(
    monkeypatch: pytest.MonkeyPatch, f: Callable[[Tensor], Tensor], begin: float
) -> None:
    """The squares of point and gradient are carried along; a step that is refused keeps them."""
    modelled, seen = _Walk._modelled, []

    def checked(self: _Walk, sums: Any, vectors: Any) -> Any:
        found = modelled(self, sums, vectors)
        expected = [[self.space.dot(a, b) for b in vectors] for a in vectors]
        size = len(found._gram)
        seen.append((found._gram, np.array(expected)[:size, :size]))
        return found

    monkeypatch.setattr(_Walk, "_modelled", checked)
    a = torch.linspace(-0.2, 0.3, 6, dtype=torch.float64)
    start = Tangent((begin * a,)) if begin else None
    secant(plain_space(6), Counted(lambda u: f(u + 0.1 * a)), 1.0, 12, start=start, base=0.0)
    assert len(seen) > 2
    for found, expected in seen:
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_rise_is_zero_and_never_negative_at_a_maximum() -> None:
    climb = secant(plain_space(4), Counted(lambda u: 3.0 - u.square().sum()), 0.5, 20)
    assert climb.rise == 0.0
    assert not climb.u.flat().any()
    assert climb.stopped == "converged"


def test_it_leaves_a_stationary_point_in_a_seeded_direction() -> None:
    def climb(seed: int | None) -> Climb:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        return secant(plain_space(5), Counted(lambda u: u.square().sum()), 0.5, 6, generator=generator)

    assert climb(None).rise == pytest.approx(0.25)
    assert torch.equal(climb(None).u.flat(), climb(None).u.flat())
    assert torch.equal(climb(7).u.flat(), climb(7).u.flat())
    assert not torch.equal(climb(7).u.flat(), climb(8).u.flat())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_choose_the_way_from_a_stationary_point(dtype: torch.dtype) -> None:
    def climb(noise: int) -> Climb:
        rounding = torch.finfo(dtype).eps * torch.randn(5, generator=torch.Generator().manual_seed(noise), dtype=dtype)
        weights = torch.arange(1.0, 6.0, dtype=dtype)
        evaluate = Counted(lambda u: (weights * u * u).sum() + rounding @ u)
        return secant(plain_space(5, dtype=dtype), evaluate, 0.1, 4, generator=torch.Generator().manual_seed(0))

    assert climb(1).rise == pytest.approx(climb(2).rise, rel=1000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("seed", range(6))
def test_a_minimum_is_left_where_rounding_hides_the_rise_of_the_first_step(seed: int) -> None:
    """A divergence from the model's own output in single precision: the gradients tell what its values do not yet.

    A random step raises it by 1e-8, the largest rise is 5e-5, and its values are off by about one rounding.
    """
    n, top = 4000, 5e-5
    generator = torch.Generator().manual_seed(seed)
    direction = torch.randn(n, generator=generator)
    direction /= direction.norm()
    errors = torch.finfo(torch.float32).eps * torch.randn(100, generator=generator)
    passes = iter(errors)

    def divergence(u: Tensor) -> Tensor:
        return top * (direction @ u) ** 2 + next(passes)

    climb = secant(plain_space(n, dtype=torch.float32), Counted(divergence), 1.0, 13, stationary=True)
    assert climb.rise == pytest.approx(top, rel=0.02)


def test_it_survives_points_without_a_finite_value_and_says_so() -> None:
    def f(u: Tensor) -> Tensor:
        return torch.where(u[0] > 0.5, math.nan, 1.0) * (u[0] + 0.1 * u[1])

    climb = secant(plain_space(2), Counted(f), 2.0, 20)
    assert not climb.finite
    assert 0.4 < climb.rise <= 0.5 + 0.1 * 2.0
    assert secant(plain_space(2), Counted(lambda u: u @ torch.ones(2, dtype=torch.float64)), 2.0, 20).finite


def walled(seed: int, radius: float, slope: float, bend: float, shift: float = 0.0) -> tuple[Counted, Tensor]:
    """A random quadratic that is finite only so far from the base point; its matrix."""
    h, g = quadratic(seed, 8, slope=slope, shift=shift)
    nothing = torch.tensor(math.nan, dtype=torch.float64)
    return Counted(lambda u: torch.where(u.norm() > radius, nothing, g @ u + bend * u @ h @ u)), h


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("radius", [0.1, 0.02])
def test_where_the_loss_is_finite_in_a_small_part_of_the_ball_alone_the_climb_gets_there(
    seed: int, radius: float
) -> None:
    """To its edge on a slope; and from a stationary point to somewhere in it, by shorter and shorter random steps."""
    evaluate, _ = walled(seed, radius, slope=1.0, bend=0.0)
    assert secant(plain_space(8), evaluate, 1.0, 20).rise > 0.99 * radius
    evaluate, h = walled(seed, radius, slope=0.0, bend=5.0, shift=2.0)
    climb = secant(plain_space(8), evaluate, 1.0, 20)
    assert climb.rise > 0.1 * 5 * float(torch.linalg.eigvalsh(h)[-1]) * radius**2
    assert not climb.finite


@pytest.mark.parametrize("seed", range(4))
def test_after_a_point_without_a_finite_loss_the_next_step_is_at_most_half_as_long(seed: int) -> None:
    evaluate, _ = walled(seed, 0.5, slope=1.0, bend=2.0)
    secant(plain_space(8), evaluate, 1.0, 20)
    losses = [float(evaluate.f(u)) for u in evaluate.points]
    best, longest = 0, math.inf
    for k in range(1, len(losses)):
        length = float((evaluate.points[k] - evaluate.points[best]).norm())
        assert length <= longest * (1 + 1e-6)
        if math.isnan(losses[k]):
            longest = SHRINK * length
        elif losses[k] > losses[best]:
            best, longest = k, math.inf


def test_it_survives_a_gradient_that_is_not_finite() -> None:
    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        flat = u.flat()
        return float(flat.sum()), like(u, torch.full_like(flat, math.nan)) if gradient else None

    climb = secant(plain_space(3), evaluate, 1.0, 10)
    assert bool(torch.isfinite(climb.u.flat()).all())
    assert climb.rise >= 0
    assert not climb.finite


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_it_refuses_a_start_without_a_finite_value(value: float) -> None:
    with pytest.raises(ValueError, match=str(value)):
        secant(plain_space(2), lambda u, gradient: (value, u), 1.0, 5)


@pytest.mark.parametrize("seed", range(4))
def test_warm_starts_make_the_rise_monotone_in_the_radius(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a = 8 * torch.randn(6, generator=generator, dtype=torch.float64)
    space, start, base, rises = plain_space(6), None, None, []
    for rho in (0.05, 0.1, 0.4, 1.0, 3.0):
        climb = secant(space, Counted(lambda u: torch.sin(a * u + 1).sum()), rho, 10, start=start, base=base)
        start, base = climb.u, climb.base
        rises.append(climb.rise)
    assert rises == sorted(rises)
    assert base == pytest.approx(6 * math.sin(1))


# ------------------------------------------------------------------------------------------------ rounding and lengths


def walk_of(g: list[float], rho: float = 2.0, loss: float = 0.0, share: float = 1.0, **how: Any) -> _Walk:
    """At the base point, with this gradient, of whose square only a ``share`` is told."""
    space = plain_space(len(g), **how)
    slope = torch.tensor(g, dtype=space.dtype)
    return _Walk(space, rho, space.zeros(), loss, Tangent((slope,)), (0.0, share * float(slope @ slope)))


@pytest.mark.parametrize("kept", [True, False])
def test_a_point_of_which_products_do_not_tell_how_long_it_is_is_put_inside_the_ball(
    monkeypatch: pytest.MonkeyPatch, kept: bool
) -> None:
    """As where vectors are nearly parallel: here the square of the gradient is told nine times too small."""
    generator = torch.Generator()
    walk = walk_of([1.0, 2.0, -0.5], share=1.0 if not kept else 1 / 9)
    if not kept:
        # A point that is no vector yet needs a last step, whose memory it takes.
        monkeypatch.setattr("hf_geosharp.sharpness.secant.KEPT", 0)
        assert walk.next(walk.plan(), generator) is not None
        walk._square /= 9
        walk.take(1.0, Tangent((torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64),)))
    point = walk.next(walk.plan(), generator)
    assert isinstance(point, Tangent if kept else Recipe)
    (square,) = walk.space.sweep((), ((point, point),))
    assert math.sqrt(square) == pytest.approx(inside(walk.space, walk.rho), rel=1e-14)
    assert walk._square == pytest.approx(square, rel=1e-14)


def test_a_first_gradient_that_is_not_finite_is_said_and_the_climb_goes_elsewhere() -> None:
    slope, asked = torch.tensor([3.0, -4.0], dtype=torch.float64), []

    def evaluate(u: Any, gradient: Wanted) -> tuple[float, Tangent | None]:
        flat = u.flat()
        loss = float(slope @ flat)
        asked.append(flat)
        found = torch.full_like(flat, math.inf) if len(asked) == 1 else slope
        return loss, like(u, found.clone()) if is_wanted(gradient, loss) else None

    climb = secant(plain_space(2), evaluate, 1.0, 12)
    assert climb.rise == pytest.approx(5.0, rel=1e-6)
    assert not climb.finite


def test_a_step_whose_loss_is_that_of_the_model_but_for_rounding_is_kept() -> None:
    """Of a loss of 1e9 a rise of 1e-6 is seen to 1e-7 at best; that says nothing against the model."""
    walk = walk_of([1e-6, 0.0], rho=1.0, loss=1e9)
    walk.next(walk.plan(), torch.Generator())
    walk.take(1e9 + 3e-6, Tangent((torch.tensor([0.9e-6, 1e-7], dtype=torch.float64),)))
    assert walk._model is not None
    assert len(walk._model.vectors) == 4
    small = walk_of([1e-6, 0.0], rho=1.0)
    small.next(small.plan(), torch.Generator())
    small.take(3e-6, Tangent((torch.tensor([0.9e-6, 1e-7], dtype=torch.float64),)))
    assert small._model is not None
    assert len(small._model.vectors) == 2  # where rounding cannot have made the difference it is far from quadratic


@pytest.mark.parametrize(
    ("dtype", "apart", "directions"),
    [(torch.float32, 1e-2, 2), (torch.float32, 1e-3, 1), (torch.float64, 1e-4, 2), (torch.float64, 1e-6, 1)],
)
def test_directions_that_rounding_makes_of_parallel_vectors_are_left_out(
    dtype: torch.dtype, apart: float, directions: int
) -> None:
    """The least eigenvalue of the products of point and gradient is half the square of what they are apart."""
    space = plain_space(2, dtype=dtype)
    u, g = torch.tensor([1.0, 0.0], dtype=dtype), torch.tensor([1.0, apart], dtype=dtype)
    walk = _Walk(space, 2.0, Tangent((u,)), 0.0, Tangent((g,)), (float(u @ u), float(g @ g)))
    walk.plan()
    assert walk._model is not None
    assert len(walk._model.center) == directions


def test_what_is_promised_is_what_the_damped_model_promises() -> None:
    """max z - ½ 4 z² is ⅛, at ¼."""
    walk = walk_of([1.0], rho=1.0)
    walk._sigma = 4.0
    assert walk.plan() == pytest.approx(1 / 8)
    assert walk._length == pytest.approx(1 / 4)


def test_damping_rises_to_what_makes_the_model_exact_and_after_a_rise_at_most_fourfold() -> None:
    """A slope of 1 promises 1 at distance 1; z - ½ σ z² is -1 there for σ = 4, and ½ for σ = 1."""
    for sigma, loss, expected in ((0.0, -1.0, 4.0), (0.0, 0.5, 1.0), (0.1, 0.5, 0.4), (0.1, 2.0, 0.05)):
        walk = walk_of([1.0], rho=1.0)
        walk.next(walk.plan(), torch.Generator())
        walk._sigma = sigma
        assert walk.take(loss, Tangent((torch.ones(1, dtype=torch.float64),)))
        assert walk._sigma == pytest.approx(expected, rel=1e-9)


def test_a_step_that_is_no_longer_than_rounding_is_not_taken() -> None:
    """From the maximum of a linear function."""
    g = torch.tensor([3.0, -4.0], dtype=torch.float64)
    space, evaluate = plain_space(2), Counted(lambda u: g @ u)
    climb = secant(space, evaluate, 1.0, 9, start=Tangent((inside(space, 1.0) * g / g.norm(),)), base=0.0)
    assert climb.stopped == "converged"
    assert len(evaluate.points) == 1


@pytest.mark.parametrize("seed", range(4))
def test_from_a_start_without_a_slope_the_random_point_lies_inside_the_ball(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """And its square is known."""
    start = torch.tensor([0.9, 0.0, 0.0], dtype=torch.float64)
    evaluate = Counted(lambda u: ((u - start).norm() - 0.05).clamp(min=0) ** 2)
    seen: list[tuple[float, float]] = []
    modelled = _Walk._modelled

    def checked(self: _Walk, sums: Any, vectors: Any) -> Any:
        seen.append((self._squares[0], self.space.dot(vectors[0], vectors[0])))
        return modelled(self, sums, vectors)

    monkeypatch.setattr(_Walk, "_modelled", checked)
    generator = torch.Generator().manual_seed(seed)
    climb = secant(
        plain_space(3), evaluate, 1.0, 9, start=Tangent((start.clone(),)), base=0.0, generator=generator
    )  # fmt: skip
    assert climb.rise > 0.1
    assert all(float(u.norm()) <= 1 for u in evaluate.points)
    assert all(known == pytest.approx(found, rel=1e-12) for known, found in seen)


# ---------------------------------------------------------------------------------------------------------- stopping


def test_settled_means_that_two_steps_added_and_the_next_one_promises_next_to_nothing() -> None:
    little, much = 0.9 * TOLERANCE, 1.1 * TOLERANCE
    assert settled([0.0, 1 - little, 1.0, 1.0], little, 0.0)
    assert not settled([0.0, 1 - much, 1.0, 1.0], little, 0.0)
    assert not settled([0.0, 1 - little, 1.0, 1.0], much, 0.0)
    assert not settled([0.0, 1.0, 1.0, 1.0], much, 0.0)
    assert not settled([0.0, 1.0, 1.0], 0.0, 0.0)
    assert not settled([1.0, 1.0, 1.0], 0.0, 0.0)  # a warm start: two steps that failed are no evidence
    assert settled([0.0, 1e-9, 2e-9, 3e-9], 1e-8, 1e-8)


def test_nothing_is_settled_on_a_hillside() -> None:
    """Steps that have become short bring little there, too."""
    rises = [0.0, 1.0, 1.0, 1.0]
    assert settled(rises, 0.0, 0.0, 0.9 * SLOPE)
    assert not settled(rises, 0.0, 0.0, 1.1 * SLOPE)
    assert settled(rises, 0.0, 1.2 * SLOPE, 1.1 * SLOPE)  # as far as rounding does not make it


def test_near_a_saddle_short_steps_are_no_evidence() -> None:
    rises = [0.0, 1.0, 1.0, 1.0]
    assert settled(rises, 0.0, 0.0, bend=0.9 * FLAT)
    assert not settled(rises, 0.0, 0.0, bend=1.1 * FLAT)
    assert not settled([0.0, 0.5, 0.9999, 1.0], 0.0, 0.0, bend=1.1 * FLAT)


def test_asked_for_the_last_time_one_evidence_will_do() -> None:
    little, much = 0.9 * TOLERANCE, 1.1 * TOLERANCE
    short, long = [0.0, 1.0, 1.0, 1.0], [0.0, 0.8, 0.9, 1.0]
    assert settled(short, little, 0.0, bend=0.99, last=True)
    assert not settled(short, little, 0.0, bend=1.01, last=True)  # a saddle
    assert not settled(short, little, 0.0, 1.1 * SLOPE, last=True)
    assert settled(long, little, 0.0, bend=0.9 * FLAT, last=True)
    assert not settled(long, little, 0.0, bend=0.9 * FLAT)
    assert not settled(long, little, 0.0, bend=1.1 * FLAT, last=True)
    assert not settled(long, much, 0.0, last=True)


@pytest.mark.parametrize("lead", [1e-4, 3e-4])
@pytest.mark.parametrize("curvature", [0.95, 1.0, 1.02])
def test_it_leaves_where_it_is_flat_along_the_sphere(
    curvature: float, lead: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around (1, 0) steps raise the loss by a millionth; on the other side of the bottleneck it is 3.5 times as high.

    On the circle (cos t, sin t) it is cos t + lead sin t + curvature sin² t / 2 + 3 sin³ t. A climb that does not ask
    how the loss bends along the sphere ends after three steps.
    """

    def f(u: Tensor) -> Tensor:
        return u[0] + lead * u[1] + curvature / 2 * u[1] ** 2 + 3 * u[1] ** 3

    t = torch.linspace(0, 2 * math.pi, 100_001, dtype=torch.float64)
    best = float(f(torch.stack([t.cos(), t.sin()])).max())
    climb = secant(plain_space(6), Counted(f), 1.0, 20)
    assert climb.rise == pytest.approx(best, rel=TOLERANCE)
    assert climb.stopped == "converged"
    assert climb.steps <= 15
    monkeypatch.setattr("hf_geosharp.sharpness.secant.FLAT", math.inf)
    monkeypatch.setattr(_Walk, "bend", 0.0)
    without = secant(plain_space(6), Counted(f), 1.0, 20)
    assert without.rise < 1.01
    assert without.steps == 3


def test_most_quadratics_cost_no_step_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those do whose maximum is flat along the sphere; what is gained there is next to nothing."""
    problems = [quadratic(seed, 12, slope=slope) for seed in range(10) for slope in (1.0, 0.2)]

    def steps() -> list[int]:
        space = plain_space(12)
        return [secant(space, Counted(lambda u, h=h, g=g: g @ u + 0.5 * u @ h @ u), 0.7, 20).steps for h, g in problems]

    with_it = steps()
    monkeypatch.setattr(_Walk, "bend", 0.0)
    without = steps()
    assert all(a >= b for a, b in zip(with_it, without, strict=True))
    assert sum(a == b for a, b in zip(with_it, without, strict=True)) >= len(problems) / 2


def test_the_slope_of_a_point_is_what_it_promises_at_the_far_side_of_the_ball() -> None:
    u, g = (torch.tensor(x, dtype=torch.float64) for x in ([0.3, -0.2, 0.1], [1.0, 2.0, -0.5]))
    space = plain_space(3)

    def walk_at(point: Tensor) -> _Walk:
        return _Walk(space, 2.0, Tangent((point,)), 0.0, Tangent((g,)), (float(point @ point), float(g @ g)))

    walk = walk_at(u)
    assert walk.slope == 0  # not asked for a plan yet
    walk.plan()
    assert walk.slope == pytest.approx(2 * float(g.norm()) - float(u @ g))
    top = walk_at(2 * g / g.norm())
    top.plan()
    assert top.slope == pytest.approx(0, abs=1e-12)


def test_one_small_rise_means_settled_where_the_next_step_promises_a_small_part_of_it() -> None:
    little, much, hardly = 0.9 * TOLERANCE, 1.1 * TOLERANCE, 0.9 * SURE * TOLERANCE
    assert settled([0.0, 0.5, 1 - little, 1.0], hardly, 0.0)
    assert not settled([0.0, 0.5, 1 - little, 1.0], little, 0.0)
    assert not settled([0.0, 0.5, 1 - much, 1.0], hardly, 0.0)
    assert not settled([0.0, 0.5, 1.0, 1.0], hardly, 0.0)  # a step that failed brings nothing
    assert not settled([0.0, 1 - little, 1.0], hardly, 0.0)


def test_it_reports_every_step_with_the_best_rise_so_far() -> None:
    told: list[tuple[int, float]] = []
    climb = secant(plain_space(3), Counted(lambda u: (5 * u).sin().sum()), 1.0, 9, report=lambda *a: told.append(a))
    assert told == list(enumerate(climb.history))[1:]


# ------------------------------------------------------------------------------------------------------ closed forms


def scalar_pair(metric: str, g: float, h: float, x: float, y: float) -> tuple[Space, Callable[..., Any]]:
    """½-free squared loss (g h x - y)² of one number g and one number h, in a metric, by exact geodesics."""
    point = tuple(torch.tensor([[[v]]], dtype=torch.float64) for v in (g, h))
    part = Part("gh", PAIR_METRICS[metric].at(*point), ((1, 1, 1), (1, 1, 1)), False, "exact")
    space = Space([part], torch.float64, torch.device("cpu"))

    def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
        end = part.frame.geodesic(part.split(u.pieces[0]), "exact")
        a, b = (p.detach().clone().requires_grad_() for p in end.point)
        loss = (a * b * x - y).square().sum()
        covector = torch.autograd.grad(loss, (a, b))
        piece = torch.empty(2, dtype=torch.float64)
        end.pullback(covector, out=part.split(piece))
        return float(loss.detach()), Tangent((piece,))

    return space, evaluate


@pytest.mark.parametrize("rho", [0.05, 0.3, 1.0])
@pytest.mark.parametrize(("g", "h", "y"), [(1.3, 0.7, 0.2), (0.5, 2.0, 3.0)])
def test_the_closed_form_of_two_numbers_under_inv(rho: float, g: float, h: float, y: float) -> None:
    """γ = (g e^b, h e^b) has length √2 |b|; the rise is y0² (e^{4b} - 1) - 2 y y0 (e^{2b} - 1)."""
    y0, reach = g * h, rho / math.sqrt(2)

    def rise(b: float) -> float:
        return y0**2 * math.expm1(4 * b) - 2 * y * y0 * math.expm1(2 * b)

    found = minimize_scalar(lambda b: -rise(b), bounds=(-reach, reach), method="bounded")
    best = max(-found.fun, rise(reach), rise(-reach))
    space, evaluate = scalar_pair("inv", g, h, 1.0, y)
    climb = secant(space, evaluate, rho, 20)
    assert climb.rise == pytest.approx(best, rel=1e-6)


# ------------------------------------------------------------------------------------------------------- tiny models


@pytest.mark.parametrize("metric", ["inv", "mix", "adaptive", "euclidean"])
@pytest.mark.parametrize("make", [bert, gpt2])
def test_on_tiny_models_it_finds_what_auto_pgd_finds_with_fewer_passes(make: Any, metric: str) -> None:
    model, batches = make(), bert_batches(2) if make is bert else gpt2_batches(2)
    fast, slow = (
        score(model, batches, metric=metric, ascent=ascent, reproducibility=False, verify=False)
        for ascent in ("secant", "apgd")
    )
    for a, b in zip(fast.per_batch, slow.per_batch, strict=True):
        assert a.value >= 0.99 * b.value
    assert fast.passes.forwards < 0.7 * slow.passes.forwards
    assert (fast.ascent, slow.ascent) == ("secant", "apgd")
    assert all(b.stopped == "budget" and b.passes == 21 for b in slow.per_batch)
    assert sum(b.passes or 0 for b in fast.per_batch) == fast.passes.forwards
    assert all(b.passes == b.steps + 1 for b in fast.per_batch)


def test_labels_of_the_model_climb_from_a_minimum() -> None:
    model, batches = bert(), [{k: v for k, v in b.items() if k != "labels"} for b in bert_batches(1)]
    fast, slow = (score(model, batches, labels="model", ascent=a, reproducibility=False) for a in ("secant", "apgd"))
    assert fast.geodesic_sharpness >= 0.99 * slow.geodesic_sharpness > 0


@pytest.mark.slow
def test_several_radii_take_fewer_passes_than_as_many_scores() -> None:
    model, batches, radii = bert(), bert_batches(1), (0.05, 0.1, 0.2)
    curve = score(model, batches, rho=radii, reproducibility=False)
    single = [score(model, batches, rho=rho, reproducibility=False) for rho in radii]
    assert curve.passes.forwards <= sum(r.passes.forwards for r in single)
    for point, alone in zip(curve.curve, single, strict=True):
        assert point.geodesic_sharpness >= 0.99 * alone.geodesic_sharpness


def test_an_unknown_ascent_is_refused() -> None:
    from hf_geosharp.errors import UsageError

    with pytest.raises(UsageError, match="ascent is 'sgd'; it is one of auto, secant, apgd"):
        score(nn.Linear(2, 2), [], ascent="sgd")
