"""inv and mix written out in the pair's own gauge, one pair at a time, with inverses and Kronecker products.

Slow and plain on purpose: no canonical gauge, no batching, nothing of the package.
"""

from __future__ import annotations

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]


def inner(metric: str, point: Pair, xi: Pair, zeta: Pair) -> Tensor:
    g, h = point
    s, t = g.mH @ g, h.mH @ h
    first, second = (s.inverse(), t.inverse()) if metric == "inv" else (t, s)
    return (torch.trace(first @ xi[0].mH @ zeta[0]) + torch.trace(second @ xi[1].mH @ zeta[1])).real


def gradient(metric: str, point: Pair, covector: Pair) -> Pair:
    g, h = point
    s, t = g.mH @ g, h.mH @ h
    if metric == "inv":
        return covector[0] @ s, covector[1] @ t
    return covector[0] @ t.inverse(), covector[1] @ s.inverse()


def vertical(point: Pair, lam: Tensor) -> Pair:
    return -point[0] @ lam, point[1] @ lam.mH


def horizontality(metric: str, point: Pair, xi: Pair) -> Tensor:
    """Zero for horizontal ξ: the largest inner product with a vertical basis vector."""
    d = point[0].shape[1]
    worst = torch.zeros((), dtype=torch.float64)
    units = [1.0] if not point[0].is_complex() else [1.0, 1j]
    for i in range(d):
        for j in range(d):
            for unit in units:
                lam = torch.zeros(d, d, dtype=point[0].dtype)
                lam[i, j] = unit
                v = vertical(point, lam)
                worst = torch.maximum(worst, (inner(metric, point, xi, v) / inner(metric, point, v, v).sqrt()).abs())
    return worst


def horizontal(metric: str, point: Pair, xi: Pair) -> Pair:
    """By the Sylvester equation X M + M X = B (inv), or the explicit form (mix)."""
    g, h = point
    s, t = g.mH @ g, h.mH @ h
    if metric == "inv":
        m, b = s @ t, s @ h.mH @ xi[1] - xi[0].mH @ g @ t
        one = torch.eye(m.shape[0], dtype=m.dtype)
        # Row-major vec: vec(M X) = (M kron 1) vec X, vec(X M) = (1 kron Mᵀ) vec X.
        system = torch.kron(m, one) + torch.kron(one, m.mT.contiguous())
        x = torch.linalg.solve(system, b.reshape(-1)).reshape(b.shape)
    else:
        x = 0.5 * (t.inverse() @ h.mH @ xi[1] - xi[0].mH @ g @ s.inverse())
    return xi[0] + g @ x.mH, xi[1] - h @ x


def acceleration(metric: str, point: Pair, xi: Pair) -> Pair:
    g, h = point
    s, t = g.mH @ g, h.mH @ h
    if metric == "inv":

        def one(g: Tensor, s: Tensor, x: Tensor) -> Tensor:
            p = s.inverse()
            return x @ p @ (x.mH @ g + g.mH @ x) - g @ p @ x.mH @ x

        return one(g, s, xi[0]), one(h, t, xi[1])

    def other(g: Tensor, x: Tensor, h: Tensor, t: Tensor, y: Tensor) -> Tensor:
        return (g @ y.mH @ y - x @ (y.mH @ h + h.mH @ y)) @ t.inverse()

    return other(g, xi[0], h, t, xi[1]), other(h, xi[1], g, s, xi[0])


def rk4(metric: str, point: Pair, xi: Pair, steps: int = 400) -> tuple[Pair, Pair]:
    """(end point, end velocity) of the geodesic, integrated with the tall matrices themselves."""

    def add(x: Pair, y: Pair, f: float) -> Pair:
        return x[0] + f * y[0], x[1] + f * y[1]

    y, v, dt = point, xi, 1.0 / steps
    for _ in range(steps):
        a1 = acceleration(metric, y, v)
        y2, v2 = add(y, v, dt / 2), add(v, a1, dt / 2)
        a2 = acceleration(metric, y2, v2)
        y3, v3 = add(y, v2, dt / 2), add(v, a2, dt / 2)
        a3 = acceleration(metric, y3, v3)
        y4, v4 = add(y, v3, dt), add(v, a3, dt)
        a4 = acceleration(metric, y4, v4)
        y = tuple(p + dt / 6 * (a + 2 * b + 2 * c + e) for p, a, b, c, e in zip(y, v, v2, v3, v4, strict=True))
        v = tuple(p + dt / 6 * (a + 2 * b + 2 * c + e) for p, a, b, c, e in zip(v, a1, a2, a3, a4, strict=True))
    return y, v
