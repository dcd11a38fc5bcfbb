"""One contract for every metric, by oracle: the formulas in the pair's own gauge, finite differences, Runge-Kutta."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_geosharp.geometry.gauge import act, canonical
from hf_geosharp.geometry.metrics import METRICS, PAIR_METRICS, FactorFrame, Metric, Tensors
from hf_geosharp.sharpness.choices import GEODESICS
from tests.oracles import pair_formulas as oracle

COPIES = 3


@dataclass(frozen=True)
class Case:
    """A metric, a field, and the sizes of a batch of random pairs (or of loose entries)."""

    metric: str
    complex: bool
    d: int

    def __str__(self) -> str:
        return f"{self.metric}-{'complex' if self.complex else 'real'}-d{self.d}"

    @property
    def paired(self) -> bool:
        return self.metric in PAIR_METRICS

    def make(self) -> Metric:
        return METRICS[self.metric]

    def dtype(self, base: torch.dtype) -> torch.dtype:
        return {torch.float64: torch.complex128, torch.float32: torch.complex64}[base] if self.complex else base

    def tensors(self, seed: int, base: torch.dtype = torch.float64) -> Tensors:
        gen = torch.Generator().manual_seed(seed)
        shapes = [(COPIES, 9, self.d), (COPIES, 7, self.d)] if self.paired else [(COPIES, 11)]
        draw = torch.complex128 if self.complex else torch.float64
        return tuple(torch.randn(s, generator=gen, dtype=draw).to(self.dtype(base)) for s in shapes)

    def element(self, seed: int, cond: float) -> Tensor:
        gen = torch.Generator().manual_seed(seed)
        dtype = torch.complex128 if self.complex else torch.float64
        u, _, vh = torch.linalg.svd(torch.randn(COPIES, self.d, self.d, generator=gen, dtype=dtype))
        scales = torch.logspace(0, 1, self.d, base=cond, dtype=torch.float64) / cond**0.5
        if self.d == 1:
            scales = torch.full((1,), cond**0.5, dtype=torch.float64)
        return (u * scales) @ vh


PAIRED = [Case(m, c, d) for m in PAIR_METRICS for c in (False, True) for d in (1, 2, 4)]
CASES = [*PAIRED, Case("adaptive", False, 1), Case("euclidean", False, 1)]
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_pair = pytest.mark.parametrize("case", PAIRED, ids=str)


each_order = pytest.mark.parametrize(
    "order", [pytest.param(order, marks=[pytest.mark.slow] if order == "exact" else []) for order in GEODESICS]
)


def flat(x: Tensors) -> Tensor:
    return torch.cat([t.flatten(1) for t in x], 1)


def distance(x: Tensors, y: Tensors) -> float:
    return float((flat(x) - flat(y)).norm() / flat(y).norm())


def singles(case: Case, x: Tensors) -> list[Tensors]:
    return [tuple(t[i] for t in x) for i in range(COPIES)]


def stacked(xs: list[Tensors]) -> Tensors:
    return tuple(torch.stack(ts) for ts in zip(*xs, strict=True))


@each_case
def test_inner_product_is_symmetric_positive_and_bilinear(case: Case) -> None:
    m, point, xi, zeta = case.make(), *(case.tensors(i) for i in range(3))
    assert torch.allclose(m.inner(point, xi, zeta), m.inner(point, zeta, xi), rtol=1e-12, atol=1e-12)
    assert (m.inner(point, xi, xi) > 0).all()
    total = tuple(a + 2 * b for a, b in zip(xi, zeta, strict=True))
    expected = m.inner(point, xi, xi) + 4 * m.inner(point, xi, zeta) + 4 * m.inner(point, zeta, zeta)
    assert torch.allclose(m.inner(point, total, total), expected, rtol=1e-11)
    assert torch.allclose(m.norm(point, xi) ** 2, m.inner(point, xi, xi), rtol=1e-12)


@each_case
def test_inner_product_is_the_formula(case: Case) -> None:
    point, xi, zeta = (case.tensors(i) for i in range(3))
    if case.paired:
        pieces = zip(*(singles(case, t) for t in (point, xi, zeta)), strict=True)
        expected = torch.stack([oracle.inner(case.metric, p, x, z) for p, x, z in pieces])
    else:
        scale = point[0] ** 2 if case.metric == "adaptive" else torch.ones_like(point[0])
        expected = (xi[0] * zeta[0] / scale).sum(1)
    assert torch.allclose(case.make().inner(point, xi, zeta), expected, rtol=1e-10, atol=1e-10)


@each_pair
@pytest.mark.parametrize(("cond", "tolerance"), [(10.0, 1e-11), (1e2, 1e-10), (1e4, 1e-7)])
def test_inner_product_is_invariant(case: Case, cond: float, tolerance: float) -> None:
    m, a = case.make(), case.element(7, cond)
    point, xi, zeta = (case.tensors(i) for i in range(3))
    moved = m.inner(act(*point, a), act(*xi, a), act(*zeta, a))
    assert torch.allclose(moved, m.inner(point, xi, zeta), rtol=tolerance, atol=tolerance)


@each_case
def test_gradient_represents_the_differential(case: Case) -> None:
    m, point, covector, xi = case.make(), *(case.tensors(i) for i in range(3))
    expected = torch.stack([(c.conj() * x).real.flatten(1).sum(1) for c, x in zip(covector, xi, strict=True)]).sum(0)
    assert torch.allclose(m.inner(point, m.gradient(point, covector), xi), expected, rtol=1e-9, atol=1e-9)


@each_pair
def test_gradient_is_the_formula(case: Case) -> None:
    point, covector = case.tensors(0), case.tensors(1)
    expected = stacked(
        [oracle.gradient(case.metric, p, c) for p, c in zip(singles(case, point), singles(case, covector), strict=True)]
    )
    assert distance(case.make().gradient(point, covector), expected) < 1e-10


@each_pair
def test_horizontal_projection(case: Case) -> None:
    """Horizontal, idempotent, kills vertical vectors, and is the general-gauge formula: each on its own."""
    m, point, xi = case.make(), case.tensors(0), case.tensors(1)
    projected = m.horizontal(point, xi)
    for p, x in zip(singles(case, point), singles(case, projected), strict=True):
        assert oracle.horizontality(case.metric, p, x) < 1e-10
    assert distance(m.horizontal(point, projected), projected) < 1e-11
    lam = case.element(3, 5.0)
    vertical = stacked([oracle.vertical(p, lam[i]) for i, p in enumerate(singles(case, point))])
    assert flat(m.horizontal(point, vertical)).norm() < 1e-10 * flat(vertical).norm()
    expected = stacked(
        [oracle.horizontal(case.metric, p, x) for p, x in zip(singles(case, point), singles(case, xi), strict=True)]
    )
    assert distance(projected, expected) < 1e-10


@each_pair
def test_gradient_of_an_invariant_function_is_horizontal(case: Case) -> None:
    m = case.make()
    point = tuple(t.requires_grad_() for t in case.tensors(0))
    target = case.tensors(5)
    value = ((point[0] @ point[1].mH - target[0] @ target[1].mH).abs() ** 2).sum()
    covector = torch.autograd.grad(value, point)
    point = tuple(t.detach() for t in point)
    g = m.gradient(point, covector)
    assert distance(m.horizontal(point, g), g) < 1e-9


@each_case
@each_order
def test_pullback_is_the_derivative(case: Case, order: str) -> None:
    m, point, covector, direction = case.make(), *(case.tensors(i) for i in range(3))
    frame = m.at(*point)
    u = tuple(0.1 * t for t in case.tensors(4))

    def value(step: float) -> Tensor:
        end = frame.geodesic(tuple(a + step * b for a, b in zip(u, direction, strict=True)), order).point
        return torch.stack([(c.conj() * e).real.sum() for c, e in zip(covector, end, strict=True)]).sum()

    step = 1e-4
    numeric = (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) / (12 * step)
    g = frame.geodesic(u, order).pullback(covector, horizontal=False)
    analytic = torch.stack([(a.conj() * b).real.sum() for a, b in zip(g, direction, strict=True)]).sum()
    assert abs(float(analytic - numeric)) < 1e-7 * max(1.0, abs(float(numeric)))
    projected = frame.geodesic(u, order).pullback(covector, horizontal=True)
    assert distance(projected, frame.horizontal(g)) < 1e-12


@each_pair
@pytest.mark.slow
def test_geodesics_against_runge_kutta(case: Case) -> None:
    """Exact = end point of 400 RK4 steps; second order = its Taylor polynomial; speed and horizontality conserved."""
    m, point = case.make(), case.tensors(0)
    xi = m.horizontal(point, tuple(0.3 * t for t in case.tensors(1)))
    xi = tuple(0.4 * x / m.norm(point, xi)[:, None, None] for x in xi)
    if case.metric == "mix":  # mix is absolute: its radius lives on the scale of the product
        xi = tuple(3 * x for x in xi)
    runs = [oracle.rk4(case.metric, p, x) for p, x in zip(singles(case, point), singles(case, xi), strict=True)]
    end, velocity = stacked([r[0] for r in runs]), stacked([r[1] for r in runs])
    assert distance(m.geodesic(point, xi, "exact"), end) < 1e-9
    assert torch.allclose(m.norm(end, velocity), m.norm(point, xi), rtol=1e-9)
    for p, v in zip(singles(case, end), singles(case, velocity), strict=True):
        assert oracle.horizontality(case.metric, p, v) < 1e-8
    second = stacked(
        [
            tuple(a + b + c / 2 for a, b, c in zip(p, x, oracle.acceleration(case.metric, p, x), strict=True))
            for p, x in zip(singles(case, point), singles(case, xi), strict=True)
        ]
    )
    assert distance(m.geodesic(point, xi, "second"), second) < 1e-12
    first = tuple(p + x for p, x in zip(point, xi, strict=True))
    assert distance(m.geodesic(point, xi, "first"), first) < 1e-13

    def remainder(t: float) -> float:
        small = tuple(t * x for x in xi)
        exact, taylor = m.geodesic(point, small, "exact"), m.geodesic(point, small, "second")
        return float((flat(exact) - flat(taylor)).norm())

    assert 6.5 < remainder(0.02) / remainder(0.01) < 9.5  # third order


@each_pair
@each_order
@pytest.mark.parametrize(("cond", "tolerance"), [(1e2, 1e-10), (1e4, 1e-7)])
def test_end_point_is_equivariant(case: Case, order: str, cond: float, tolerance: float) -> None:
    m, point, a = case.make(), case.tensors(0), case.element(7, cond)
    xi = tuple(0.2 * t for t in m.horizontal(point, case.tensors(1)))
    here = act(*m.geodesic(point, xi, order), a)
    there = m.geodesic(act(*point, a), act(*xi, a), order)
    assert distance((here[0] @ here[1].mH,), (there[0] @ there[1].mH,)) < tolerance


@pytest.mark.parametrize("metric", ["adaptive", "euclidean"])
def test_elementwise_geodesics(metric: str) -> None:
    m = METRICS[metric]
    theta = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    xi = torch.tensor([[0.1, 0.3, -0.2]], dtype=torch.float64)
    exact = theta * torch.exp(xi / theta) if metric == "adaptive" else theta + xi
    second = theta + xi + (xi**2 / theta / 2 if metric == "adaptive" else 0)
    assert torch.allclose(m.geodesic((theta,), (xi,), "exact")[0], exact, rtol=1e-14)
    assert torch.allclose(m.geodesic((theta,), (xi,), "second")[0], second, rtol=1e-14)
    assert torch.allclose(m.geodesic((theta,), (xi,), "first")[0], theta + xi, rtol=1e-14)


def test_a_zero_entry_has_no_room_in_the_adaptive_metric() -> None:
    frame = METRICS["adaptive"].at(torch.tensor([[0.0, 2.0]]))
    assert frame.gradient((torch.ones(1, 2),))[0].tolist() == [[0.0, 2.0]]
    assert frame.clip((torch.ones(1, 2),))[0].tolist() == [[0.0, 1.0]]
    assert frame.dimension == 1


@each_pair
@pytest.mark.parametrize("order", ["second", pytest.param("exact", marks=pytest.mark.slow)])
def test_damping_keeps_the_invariance(case: Case, order: str) -> None:
    """A damped frame gives the same function along the orbit, and its geodesics are those of the damped metric."""
    m, point, a = PAIR_METRICS[case.metric], case.tensors(0), case.element(7, 1e2)
    u = tuple(0.2 * t for t in case.tensors(1))
    ends = []
    for p in (point, act(*point, a)):
        frame = m.at(*p, damping=1e-2)
        h = frame.horizontal(u)
        assert distance(frame.horizontal(h), h) < 1e-11
        g, k = frame.geodesic(h, order).point
        ends.append(g @ k.mH)
    assert distance((ends[0],), (ends[1],)) < 1e-9


def acceleration(metric: str, point: Tensors, xi: Tensors, shift: float) -> Tensors:
    """That of a geodesic, out of the Lagrangian of the metric with S + shift and T + shift, by autograd."""

    def real(x: Tensors) -> Tensor:
        return torch.cat([(torch.view_as_real(t) if t.is_complex() else t).flatten() for t in x])

    def split(flat: Tensor) -> Tensors:
        parts = flat.split([real((t,)).numel() for t in point])
        return tuple(
            torch.view_as_complex(p.view(*t.shape, 2)) if t.is_complex() else p.view(t.shape)
            for p, t in zip(parts, point, strict=True)
        )

    def energy(x: Tensor, v: Tensor) -> Tensor:
        (g, h), (a, b) = split(x), split(v)
        one = shift * torch.eye(g.shape[-1], dtype=g.dtype)
        s, t = g.mH @ g + one, h.mH @ h + one
        weights = (torch.linalg.inv(s), torch.linalg.inv(t)) if metric == "inv" else (t, s)
        return sum(torch.trace(w @ y.mH @ y).real for w, y in zip(weights, (a, b), strict=True)) / 2  # type: ignore[return-value]

    x, v = real(point), real(xi)
    pull, momentum = torch.func.grad(energy), torch.func.grad(energy, argnums=1)
    mass = torch.func.jacfwd(momentum, argnums=1)(x, v)
    moved = torch.func.jvp(lambda y: momentum(y, v), (x,), (v,))[1]
    return split(torch.linalg.solve(mass, pull(x, v) - moved))


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("case", [case for case in PAIRED if case.d == 2], ids=str)
def test_geodesics_accelerate_as_the_lagrangian_of_the_metric_says(case: Case, damping: float) -> None:
    """The second-order end point by that, and the exact one to the third order; horizontal is what its metric says."""
    frame = PAIR_METRICS[case.metric].at(*case.tensors(0), damping=damping)
    u = frame.horizontal(tuple(0.05 * x for x in case.tensors(1)))
    zero = tuple(torch.zeros_like(x) for x in u)
    base, xi, end = frame.geodesic(zero, "first").point, frame.vector(u), frame.geodesic(u, "second").point
    ends = [frame.geodesic(tuple(t * x for x in u), "exact").point for t in (0.2, -0.2)]
    for i in range(COPIES):
        shift = damping * float(frame.s[i].mean())

        def bent(point: Tensors, velocity: Tensors, shift: float = shift) -> Tensors:
            return acceleration(case.metric, point, velocity, shift)

        point, moved = (tuple(x[i] for x in y) for y in (base, xi))
        first = bent(point, moved)
        expected = tuple(a + b + c / 2 for a, b, c in zip(point, moved, first, strict=True))
        assert distance(tuple(x[i : i + 1] for x in end), tuple(x[None] for x in expected)) < 1e-12
        # How that changes on the way is the third derivative.
        there, back = (
            bent(*(tuple(x + h * y for x, y in zip(*xs, strict=True)) for xs in ((point, moved), (moved, first))))
            for h in (1e-3, -1e-3)
        )
        third = tuple((x - y)[None] / 2e-3 for x, y in zip(there, back, strict=True))
        odd = tuple((x[i] - y[i])[None] / 2 - 0.2 * v[None] for x, y, v in zip(*ends, moved, strict=True))
        # The rest is of the fifth order: at most 2e-4 was measured.
        assert distance(odd, tuple(0.2**3 / 6 * x for x in third)) < 1e-3
    # Horizontal is at right angles to what the group does, in the damped metric.
    lam = case.element(3, 5.0)
    vertical = frame.coordinates((-base[0] @ lam, base[1] @ lam.mH))
    products = sum((x.conj() * y).real.sum((1, 2)) for x, y in zip(u, vertical, strict=True))
    assert torch.allclose(products, torch.zeros(COPIES, dtype=torch.float64), atol=1e-12)  # type: ignore[arg-type]
    assert float(flat(frame.horizontal(vertical)).norm() / flat(vertical).norm()) < 1e-11


@each_case
@each_order
def test_single_precision(case: Case, order: str) -> None:
    """The same in float32: within 2e-6 for end points, 1e-5 for the pulled-back gradient and horizontality."""
    m = case.make()
    wide = [case.tensors(i) for i in range(3)]
    point, xi, covector = ([t.float() if not case.complex else t.to(torch.complex64) for t in x] for x in wide)
    frame, frame64 = m.at(*point), m.at(*wide[0])
    u = frame.horizontal(tuple(0.1 * t for t in xi))
    u64 = frame64.horizontal(tuple(0.1 * t for t in wide[1]))
    end, end64 = frame.geodesic(u, order), frame64.geodesic(u64, order)
    assert end.point[0].dtype == case.dtype(torch.float32)
    assert distance(end.point, end64.point) < 2e-6
    pulled = end.pullback(tuple(covector))
    assert distance(pulled, end64.pullback(wide[2])) < 1e-5
    assert distance(frame.horizontal(pulled), pulled) < 1e-5


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("spread", [1.0, 1e2, 1e5])
@pytest.mark.parametrize("metric", PAIR_METRICS)
def test_single_precision_loses_no_more_than_its_rounding(metric: str, spread: float, complex_: bool) -> None:
    """Matrices of a head's size are in it too; singular values from 1 to 1 / spread, and steps as large as they are."""
    generator = torch.Generator().manual_seed(0)
    dtype, narrow = (torch.complex128, torch.complex64) if complex_ else (torch.float64, torch.float32)
    g, h, *u = (torch.randn(3, n, 16, dtype=dtype, generator=generator) for n in (65, 64, 65, 64))
    base = canonical(g * torch.logspace(0, -math.log10(spread), 16, dtype=torch.float64), h)
    wide, lean = (PAIR_METRICS[metric].frame(base, d) for d in (dtype, narrow))
    size = 0.3 / math.sqrt(sum(float(x.abs().square().sum()) for x in u))
    size *= float(base.s.min().sqrt()) if metric == "mix" else 1.0
    u = list(wide.horizontal(tuple(size * x for x in u)))
    ends = wide.geodesic(tuple(u), "second"), lean.geodesic(tuple(x.to(narrow) for x in u), "second")
    assert ends[1].point[0].dtype == narrow
    assert distance(tuple(x.to(dtype) for x in ends[1].point), ends[0].point) < 3e-7
    covector = tuple(torch.randn(x.shape, dtype=dtype, generator=generator) for x in u)
    pulled = ends[0].pullback(covector), ends[1].pullback(tuple(x.to(narrow) for x in covector))
    assert distance(tuple(x.to(dtype) for x in pulled[1]), pulled[0]) < 3e-7


@pytest.mark.parametrize("metric", PAIR_METRICS)
def test_pairs_that_are_almost_zero_have_finite_end_points_and_gradients_where_they_are(metric: str) -> None:
    """The factors of the second-order term are beyond single precision there; times zero they are zero."""
    generator = torch.Generator().manual_seed(0)
    g, h = (1e-14 * torch.randn(2, n, 4, dtype=torch.float64, generator=generator) for n in (7, 6))
    g[1], h[1] = 1e14 * g[1], 1e14 * h[1]
    frame = PAIR_METRICS[metric].frame(canonical(g, h), torch.float32)
    end = frame.geodesic((torch.zeros(2, 7, 4), torch.zeros(2, 6, 4)), "second")
    # The gradients of a function of the product G Hᵀ.
    x = torch.randn(2, 7, 6, dtype=torch.float64, generator=generator)
    base = canonical(g, h)
    pulled = end.pullback(tuple(c.float() for c in (x @ base.h, x.mT @ base.g)))
    assert all(bool(torch.isfinite(x).all()) for x in (*end.point, *pulled))
    assert all(x.dtype == torch.float32 for x in (*end.point, *pulled))


# ----------------------------------------------------------------------------------------------------------- isometries


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize("d", [1, 2, 4])
def test_where_rotations_are_left_the_frame_is_that_of_the_orbit(complex_: bool, d: int) -> None:
    """Random directions are drawn in it: they are the same for all pairs of an orbit."""
    case = Case("inv", complex_, d)
    g, h = case.tensors(seed=1)
    rotation = torch.linalg.qr(case.element(seed=2, cond=10.0))[0]
    if d == 1:
        rotation = rotation * (torch.exp(torch.tensor(0.7j)) if complex_ else -1.0)
    frame = FactorFrame(g, h, g.dtype, cutoff=1e-12)
    turned = FactorFrame(g @ rotation, h @ rotation, g.dtype, cutoff=1e-12)
    u = case.tensors(seed=3)
    for mine, other in zip(frame.q, turned.q, strict=True):
        torch.testing.assert_close(other, mine, rtol=1e-10, atol=1e-10)
    for order in GEODESICS:
        for end, there in zip(frame.geodesic(u, order).point, turned.geodesic(u, order).point, strict=True):
            torch.testing.assert_close(there, end @ rotation, rtol=1e-10, atol=1e-10)
    start = frame.geodesic(tuple(torch.zeros_like(x) for x in u), "first").point
    for x, wanted in zip(start, (g, h), strict=True):
        torch.testing.assert_close(x, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("complex_", [False, True])
@pytest.mark.parametrize(("rows_g", "rows_h", "d"), [(7, 6, 2), (3, 6, 4), (6, 2, 3)])
def test_where_rotations_are_left_the_dimension_is_that_of_what_moves(
    rows_g: int, rows_h: int, d: int, complex_: bool
) -> None:
    """Of factors with fewer rows than columns, too: the rank of u -> G(1), H(1)."""
    dtype, generator = torch.complex128 if complex_ else torch.float64, torch.Generator().manual_seed(0)
    g, h = (torch.randn(2, n, d, dtype=dtype, generator=generator) for n in (rows_g, rows_h))
    g[1, :, -1] = g[1, :, 0]
    frame = FactorFrame(g, h, dtype, cutoff=1e-12)
    sizes = [x.numel() for x in (g, h)]

    def end(flat: Tensor) -> Tensor:
        u = tuple(x.view_as(y) for x, y in zip(flat.split(sizes), (g, h), strict=True))
        moved = torch.cat([x.flatten() for x in frame.geodesic(u, "first").point])
        return torch.view_as_real(moved).flatten() if complex_ else moved

    start = end(torch.zeros(sum(sizes), dtype=dtype))
    expected = torch.cat([g.flatten(), h.flatten()])
    assert torch.allclose(start, torch.view_as_real(expected).flatten() if complex_ else expected, atol=1e-12)
    directions = [unit * row for unit in ((1, 1j) if complex_ else (1,)) for row in torch.eye(sum(sizes), dtype=dtype)]
    moves = torch.stack([end(row) - start for row in directions])
    assert frame.dimension == int(torch.linalg.matrix_rank(moves))
