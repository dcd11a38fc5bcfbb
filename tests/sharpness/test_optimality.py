"""The ascent against the true maximum: brute force in the stored gauge, and closed forms.

The brute force shares nothing with the package: it starts many local optimisers on the loss written as a function of
a tangent vector at the weights as they are stored, with projection and geodesics by their textbook formulas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from scipy.optimize import minimize, minimize_scalar
from torch import Tensor, nn

from hf_geosharp.geometry.metrics import PAIR_METRICS, Order
from hf_geosharp.geometry.space import Part, Space
from hf_geosharp.sharpness.ascent import Climb, auto_pgd
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.symmetry.map import SymmetryMap
from tests.oracles import pair_formulas as oracle
from tests.sharpness.tiny import TinyAttention, attention_data, attention_map, columns_map

Batch = dict[str, Tensor]


@contextmanager
def charted(
    model: nn.Module, symmetries: SymmetryMap, geometry: Geometry, batch: Batch
) -> Iterator[tuple[Chart, Callable[[Tensor, bool], tuple[float, Tensor | None]]]]:
    with borrow(model) as borrowed:
        chart = Chart(borrowed, symmetries, geometry)
        objective = Objective(model, batch)

        def evaluate(u: Tensor, gradient: bool) -> tuple[float, Tensor | None]:
            chart.write(u)
            value = objective.evaluate(gradient)
            return value, chart.pull() if gradient else None

        yield chart, evaluate


def climb(
    model: nn.Module, symmetries: SymmetryMap, geometry: Geometry, batch: Batch, rho: float, steps: int = 20
) -> Climb:
    with charted(model, symmetries, geometry, batch) as (chart, evaluate):
        return auto_pgd(chart.space, evaluate, rho, steps)


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
                    across = view.axes[0] == ("o",)
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


RADII = {"inv": (0.1, 0.5), "mix": (0.1, 0.5)}
CASES = [(m, r, o) for m in RADII for r in RADII[m] for o in ("second", "exact")]


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(("metric", "rho", "order"), CASES)
def test_ascent_reaches_99_per_cent_of_the_brute_force_maximum(
    metric: str, rho: float, order: Order, seed: int
) -> None:
    model, batch = TinyAttention(seed), attention_data(seed)
    assert sum(p.numel() for p in model.parameters()) <= 60
    brute = BruteForce(model, attention_map(), batch, metric, order).maximum(rho, starts=3)
    found = climb(model, attention_map(), Geometry(metric, order), batch, rho)
    assert brute > 1e-3
    # 1e-6: what the optimiser leaves, and the integration of mix in four steps.
    assert 0.99 * brute <= found.rise <= brute * (1 + 1e-6)
