"""The ascent against the true maximum: brute force in the stored gauge, and closed forms.

The brute force shares nothing with the package: it starts many local optimisers on the loss written as a function of
a tangent vector at the weights as they are stored, with projection and geodesics by their textbook formulas.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn

from hf_geosharp.geometry.metrics import PAIR_METRICS, Order
from hf_geosharp.geometry.space import Part, Space, Tangent
from hf_geosharp.sharpness.ascent import Climb, Evaluate, auto_pgd
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.settings import CLIMBS
from hf_geosharp.symmetry.map import SymmetryMap
from tests.oracles import pair_formulas as oracle
from tests.sharpness.tiny import TinyAttention, attention_data, attention_map, columns_map

Batch = dict[str, Tensor]


@contextmanager
def charted(
    model: nn.Module, symmetries: SymmetryMap, geometry: Geometry, batch: Batch
) -> Iterator[tuple[Chart, Evaluate]]:
    with borrow(model) as borrowed:
        chart = Chart(borrowed, symmetries, geometry)
        objective = Objective(model, batch)
        yield chart, partial(loss_at, chart, objective)


def climb(
    model: nn.Module, symmetries: SymmetryMap, geometry: Geometry, batch: Batch, rho: float, steps: int = 20,
    ascent: str = "apgd",
) -> Climb:  # fmt: skip
    with charted(model, symmetries, geometry, batch) as (chart, evaluate):
        return CLIMBS[ascent](chart.space, evaluate, rho, steps)


# --------------------------------------------------------------------------------------------------- brute force


class BruteForce:
    """The rise of the loss as a function of orthonormal coordinates z at the stored weights."""

    def __init__(self, model: nn.Module, symmetries: SymmetryMap, batch: Batch, metric: str, order: Order) -> None:
        self.model, self.batch, self.metric, self.order = model, batch, metric, order
        self.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.pairs = symmetries.pairs
        self.loose = [n for n in self.weights if n not in symmetries.parameters]
        self.points = [tuple(f[0] for f in p.factors(self.weights)) for p in self.pairs]
        self.size = sum(x.numel() for p in self.points for x in p) + sum(self.weights[n].numel() for n in self.loose)
        self.base = float(self._loss(self.weights))

    def _loss(self, weights: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(self.model, weights, (), self.batch).loss

    def _frame(self, point: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """ξ = z F makes the inner product that of z."""
        s, t = (x.mT @ x for x in point)
        if self.metric == "inv":
            return torch.linalg.cholesky(s).mT, torch.linalg.cholesky(t).mT
        return torch.linalg.inv(torch.linalg.cholesky(t)), torch.linalg.inv(torch.linalg.cholesky(s))

    def _end(self, point: tuple[Tensor, Tensor], xi: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        if self.order == "second":
            a = oracle.acceleration(self.metric, point, xi)
            return point[0] + xi[0] + a[0] / 2, point[1] + xi[1] + a[1] / 2
        if self.metric == "mix":
            return oracle.rk4("mix", point, xi, steps=4)[0]

        def one(x: Tensor, v: Tensor) -> Tensor:
            """The geodesic of the right-invariant metric on GL(N), seen on N x d matrices."""
            a = v @ (x.mT @ x).inverse() @ x.mT
            return torch.linalg.matrix_exp(a - a.mT) @ torch.linalg.matrix_exp(a.mT) @ x

        return one(point[0], xi[0]), one(point[1], xi[1])

    def rise(self, z: Tensor) -> Tensor:
        at, weights = 0, dict(self.weights)

        def take(like: Tensor) -> Tensor:
            nonlocal at
            at += like.numel()
            return z[at - like.numel() : at].reshape(like.shape)

        for pair, point in zip(self.pairs, self.points, strict=True):
            frame = self._frame(point)
            xi = (take(point[0]) @ frame[0], take(point[1]) @ frame[1])
            ends = self._end(point, oracle.horizontal(self.metric, point, xi))
            for views, end in zip((pair.g, pair.h), ends, strict=True):
                row = 0
                for view in views:  # every parameter of these modules lies whole in one view
                    block = end[row : row + view.height]
                    stored = self.weights[view.parameter]
                    across = any(a.name == "o" and a.dimension == 0 for a in view.axes)
                    weights[view.parameter] = (block if across else block.mT).reshape(stored.shape)
                    row += view.height
        for name in self.loose:
            theta = self.weights[name]
            weights[name] = theta * (1 + take(theta))
        return self._loss(weights) - self.base

    def maximum(self, rho: float, starts: int, seed: int = 0) -> float:
        rng = np.random.default_rng(seed)

        def negative(z: np.ndarray) -> tuple[float, np.ndarray]:
            x = torch.from_numpy(z).requires_grad_()
            value = -self.rise(x)
            return float(value.detach()), torch.autograd.grad(value, x)[0].numpy()

        ball = {"type": "ineq", "fun": lambda z: rho**2 - z @ z, "jac": lambda z: -2 * z}
        best = 0.0
        for _ in range(starts):
            z = rng.normal(size=self.size)
            z *= rho / np.linalg.norm(z)
            found = minimize(negative, z, jac=True, method="SLSQP", constraints=[ball], options={"maxiter": 60})
            z = found.x * min(1.0, rho / np.linalg.norm(found.x))
            best = max(best, -negative(z)[0])
        return best


FAST = [("inv", 0.1, "second", 0), ("inv", 0.5, "second", 0), ("mix", 0.5, "second", 0)]
SLOW = [
    *(("inv", rho, order, seed) for rho in (0.1, 0.5) for order in ("second", "exact") for seed in (1, 2)),
    *(("mix", rho, "second", 1) for rho in (0.1, 0.5)),
    *(("mix", rho, "exact", 0) for rho in (0.1, 0.5)),
]


@pytest.mark.parametrize(
    ("metric", "rho", "order", "seed"), [*FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_ascent_reaches_99_per_cent_of_the_brute_force_maximum(
    metric: str, rho: float, order: Order, seed: int
) -> None:
    model, batch = TinyAttention(seed), attention_data(seed)
    assert sum(p.numel() for p in model.parameters()) <= 60
    brute = BruteForce(model, attention_map(), batch, metric, order).maximum(rho, starts=3)
    assert brute > 1e-3
    # The optimiser stops within 1e-6 of its maximum; four Runge-Kutta steps leave 1e-5.
    rounding = 1e-5 if (metric, order) == ("mix", "exact") else 1e-6
    for ascent in CLIMBS:
        found = climb(model, attention_map(), Geometry(metric, order), batch, rho, ascent=ascent)
        assert 0.99 * brute <= found.rise <= brute * (1 + rounding), ascent


# --------------------------------------------------------------------------------------------------- closed forms


class Scalars(nn.Module):
    """y = G H x for numbers G and H, squared loss against a target."""

    def __init__(self, g: float, h: float) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.tensor([g], dtype=torch.float64))
        self.h = nn.Parameter(torch.tensor([h], dtype=torch.float64))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.g * self.h * x - labels).square().mean()}


@pytest.mark.parametrize(("g", "h"), [(1.3, 0.4), (-0.02, 26.0)])
@pytest.mark.parametrize("target", [0.1, 2.0])
@pytest.mark.parametrize("rho", [0.1, 0.5, 1.0])
def test_inv_sharpness_of_a_product_of_two_numbers_is_the_closed_form(
    g: float, h: float, target: float, rho: float
) -> None:
    x = 0.7
    y0 = g * h * x

    def closed(b: float) -> float:
        return y0**2 * math.expm1(4 * b) - 2 * target * y0 * math.expm1(2 * b)

    # The direction (G b, H b) has the length sqrt(2) |b|.
    most = rho / math.sqrt(2)
    inner = minimize_scalar(lambda b: -closed(b), bounds=(-most, most), method="bounded")
    exact = max(closed(-most), closed(most), -inner.fun)
    batch = {"x": torch.tensor([x], dtype=torch.float64), "labels": torch.tensor([target], dtype=torch.float64)}
    found = climb(Scalars(g, h), columns_map("g", "h"), Geometry("inv", "exact"), batch, rho, steps=60)
    assert found.rise == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_exact_geodesics_of_a_diagonal_net_are_the_closed_forms(metric: str) -> None:
    u = torch.tensor([1.0, -0.3, 2.0, 1e-3], dtype=torch.float64)
    v = torch.tensor([0.5, 0.7, -1.5, 40.0], dtype=torch.float64)
    b = torch.tensor([0.3, -0.2, 0.05, 0.4], dtype=torch.float64)
    for t in (0.25, 1.0):
        factor = (b * t).exp() if metric == "inv" else (1 + 2 * b * t).sqrt()
        point = (u[:, None, None], v[:, None, None])
        velocity = ((u * b * t)[:, None, None], (v * b * t)[:, None, None])
        end = PAIR_METRICS[metric].geodesic(point, velocity, "exact")
        # mix is integrated, with an error control of its own.
        tolerance = 1e-13 if metric == "inv" else 1e-9
        torch.testing.assert_close(end[0].flatten(), u * factor, rtol=tolerance, atol=0)
        torch.testing.assert_close(end[1].flatten(), v * factor, rtol=tolerance, atol=0)


class Diagonal(nn.Module):
    """y = Σ u_i v_i x_i, squared loss."""

    def __init__(self, u: Tensor, v: Tensor) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(u.clone()), nn.Parameter(v.clone())

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": (x @ (self.u * self.v) - labels).square().mean()}


@pytest.mark.parametrize("metric", ["inv", pytest.param("mix", marks=pytest.mark.slow)])
def test_score_of_a_diagonal_net_is_the_maximum_over_its_closed_form_geodesics(metric: str) -> None:
    generator = torch.Generator().manual_seed(2)
    u, v = (torch.tensor(x, dtype=torch.float64) for x in ([1.2, -0.8, 2.0], [0.9, 1.5, -0.4]))
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    labels = x @ torch.tensor([0.4, -0.2, 0.9], dtype=torch.float64)
    rho, beta = 0.3, u * v  # mix: no product reaches zero inside the ball, where geodesics would end

    def moved(z: np.ndarray) -> Tensor:
        """u v at the end of the horizontal geodesic with orthonormal coordinates z."""
        z = torch.from_numpy(z)
        # inv: the velocities (u b, v b) have the length √2 |b|; mix: √2 |u v b|.
        if metric == "inv":
            return beta * (2 * z / math.sqrt(2)).exp()
        return beta + 2 * z / math.sqrt(2) * beta.sign()

    def rise(z: np.ndarray) -> float:
        inside = z * min(1.0, rho / np.linalg.norm(z))
        return float((x @ moved(inside) - labels).square().mean() - (x @ beta - labels).square().mean())

    rng = np.random.default_rng(0)
    ball = {"type": "ineq", "fun": lambda z: rho**2 - z @ z}
    starts = (rho * z / np.linalg.norm(z) for z in rng.normal(size=(8, 3)))
    found_by_brute_force = (
        minimize(lambda z: -rise(z), z, method="SLSQP", constraints=[ball], options={"ftol": 1e-14}).x for z in starts
    )
    exact = max(map(rise, found_by_brute_force))
    found = climb(
        Diagonal(u, v), columns_map("u", "v", 3), Geometry(metric, "exact"), {"x": x, "labels": labels}, rho, steps=20
    )
    assert found.rise == pytest.approx(exact, rel=1e-7)  # the optimiser differentiates numerically


# ----------------------------------------------------------------------------------------------------- projection


@pytest.mark.parametrize(
    ("metric", "rho"), [("inv", 0.1), ("inv", 0.5), pytest.param("mix", 0.1, marks=pytest.mark.slow)]
)
def test_with_exact_geodesics_projection_does_not_change_the_worst_case(metric: str, rho: float) -> None:
    generator = torch.Generator().manual_seed(4)
    g, h, target = (
        torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((2, 4, 2), (2, 5, 2), (2, 4, 5))
    )
    frame = PAIR_METRICS[metric].at(g, h)
    space = Space([Part("gh", frame, ((2, 2, 4), (2, 2, 5)), False, "exact")], torch.float64, torch.device("cpu"))

    def climbed(horizontal: bool) -> tuple[float, float]:
        def evaluate(u: Tangent, gradient: bool) -> tuple[float, Tangent | None]:
            part, piece = next(space.slices(u))
            end = frame.geodesic(part.split(piece), "exact")
            a, b = (x.detach().requires_grad_() for x in end.point)
            value = (torch.tanh(a @ b.mT) - target).square().mean()
            pulled = space.zeros()
            covector = torch.autograd.grad(value, (a, b))
            for out, x in zip(part.split(pulled.pieces[0]), end.pullback(covector, horizontal=horizontal), strict=True):
                out.copy_(x)
            return float(value.detach()), pulled if gradient else None

        found = auto_pgd(space, evaluate, rho, 60)
        vertical = space.combine(space.empty(), (found.u, 1.0), (space.horizontal_(found.u.clone()), -1.0))
        return found.rise, space.norm(vertical) / space.norm(found.u)

    projected, vertical = climbed(True)
    free, _ = climbed(False)
    assert vertical < 1e-12
    assert free == pytest.approx(projected, rel=1e-6)
