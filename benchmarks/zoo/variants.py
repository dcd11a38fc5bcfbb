"""Scores that the package does not offer, for the ablations: without a projection, and damped in the stored gauge."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hf_geosharp.geometry.metrics import EndPoint, Frame, Order, PairFrame, Tensors
from hf_geosharp.geometry.space import Part
from hf_geosharp.sharpness import runner
from hf_geosharp.sharpness.chart import Chart

USUAL = "usual"


@contextlib.contextmanager
def no_projection() -> Iterator[None]:
    """Tangent vectors keep their part along the symmetries; random ones have all directions that the pairs have."""

    def vertical(self: PairFrame, p: Tensor) -> Tensor:
        return torch.zeros_like(p[0])

    def dimension(self: PairFrame) -> int:
        return int(self.kept.sum()) * (self.q[0].shape[-2] + self.q[1].shape[-2])

    with (
        mock.patch.object(PairFrame, "_vertical", vertical),
        mock.patch.object(PairFrame, "dimension", property(dimension)),
    ):
        yield


@contextlib.contextmanager
def stored_gauge() -> Iterator[None]:
    """Damping ε adds ε · mean(diag) to GᵀG and HᵀH as they are stored: like the paper's, it sees the gauge."""
    with mock.patch.object(runner, "Chart", StoredChart):
        yield


VARIANTS: dict[str, Callable[[], AbstractContextManager[None]]] = {
    USUAL: contextlib.nullcontext,
    "no projection": no_projection,
    "damped as stored": stored_gauge,
}


class StoredChart(Chart):
    """A chart whose pairs stay in the gauge that they are stored in."""

    def _pair_part(self, batch: Any, ranks: tuple[Tensor, ...]) -> Part:
        part = super()._pair_part(batch, ranks)
        wide = {n: self._wide.get(n, self._tensors[n]).to(torch.float64) for n in batch.parameters}
        factors = [torch.empty(shape, dtype=torch.float64) for shape in part.shapes]
        batch.read(wide, factors)
        geometry = self.geometry
        frame = StoredFrame(geometry.metric, factors[0].mT, factors[1].mT, geometry.damping, self._borrowed.dtype)
        return replace(part, frame=frame)


class StoredFrame(Frame):
    """The frame of a damped inv or mix at a pair (G, H) of real matrices, in the gauge that it has.

    With S = GᵀG and T = HᵀH, damped, the coordinates of ξ_G are ξ_G S^-½ in inv and ξ_G T^½ in mix.
    """

    def __init__(self, metric: str, g: Tensor, h: Tensor, damping: float, dtype: torch.dtype) -> None:
        self._metric, self._dtype, self._pair = metric, dtype, (g, h)
        grams = [_damped(x.mT @ x, damping) for x in (g, h)]
        own = grams if metric == "inv" else grams[::-1]
        self._solved = [torch.linalg.inv(x) for x in own]
        self._out = [_power(x, 0.5 if metric == "inv" else -0.5) for x in own]
        self._back = [torch.linalg.inv(x) for x in self._out]
        self._vertical = torch.linalg.qr(self._orbit()).Q

    def _orbit(self) -> Tensor:
        """Coordinates of the directions (-G Λ, H Λᵀ) along the orbit, as columns: (copies, (N + M) d, d²)."""
        g, h = self._pair
        d = g.shape[-1]
        columns = []
        for unit in torch.eye(d * d, dtype=g.dtype).view(d * d, d, d):
            columns.append(self._flat(self.coordinates((-g @ unit, h @ unit.mT))))
        return torch.stack(columns, -1)

    @staticmethod
    def _flat(u: Tensors) -> Tensor:
        return torch.cat([x.flatten(1) for x in u], 1)

    @property
    def dimension(self) -> int:
        """Coordinates less those along the orbits, of pairs of full rank."""
        return self._vertical.shape[0] * (self._vertical.shape[1] - self._vertical.shape[2])

    def vector(self, u: Tensors) -> Tensors:
        """ξ = u times the weight."""
        return tuple(x @ w.to(x.dtype) for x, w in zip(u, self._out, strict=True))

    def coordinates(self, xi: Tensors) -> Tensors:
        """Its inverse."""
        return tuple(x @ w.to(x.dtype) for x, w in zip(xi, self._back, strict=True))

    def gradient(self, covector: Tensors) -> Tensors:
        """The weights are symmetric."""
        return self.vector(covector)

    def clip(self, u: Tensors) -> Tensors:
        """All of u: the pairs have full rank."""
        return u

    def horizontal(self, u: Tensors) -> Tensors:
        """u less its part along the orbits."""
        flat = self._flat(u).to(torch.float64).unsqueeze(-1)
        rest = (flat - self._vertical @ (self._vertical.mT @ flat)).squeeze(-1)
        parts = rest.split([x[0].numel() for x in u], 1)
        return tuple(part.view(x.shape).to(x.dtype) for part, x in zip(parts, u, strict=True))

    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """Of the first or second order."""
        return _StoredEnd(self, u, order)

    def end(self, u: Tensors, order: Order) -> Tensors:
        """The end point, differentiably."""
        g, h = (x.to(self._dtype) for x in self._pair)
        xi, eta = self.vector(u)
        if order == "first":
            return g + xi, h + eta
        if order == "exact":
            raise NotImplementedError("exact geodesics of pairs that are damped in the stored gauge")
        m, n = (x.to(self._dtype) for x in self._solved)
        c, k = xi.mT @ g, eta.mT @ h
        if self._metric == "inv":
            return (
                g + xi + (xi @ m @ (c + c.mT) - g @ m @ (xi.mT @ xi)) / 2,
                h + eta + (eta @ n @ (k + k.mT) - h @ n @ (eta.mT @ eta)) / 2,
            )
        return (
            g + xi + (g @ (eta.mT @ eta) - xi @ (k + k.mT)) @ m / 2,
            h + eta + (h @ (xi.mT @ xi) - eta @ (c + c.mT)) @ n / 2,
        )


class _StoredEnd(EndPoint):
    def __init__(self, frame: StoredFrame, u: Tensors, order: Order) -> None:
        self._frame = frame
        with torch.enable_grad():
            self._u = tuple(x.detach().requires_grad_() for x in u)
            self._end = frame.end(self._u, order)
        # As the end points of other pairs are: transposed in memory.
        self.point = tuple(x.detach().mT.contiguous().mT for x in self._end)

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        found: Tensors = torch.autograd.grad(self._end, self._u, covector)
        pulled = self._frame.horizontal(found) if horizontal else found
        return pulled if out is None else tuple(o.copy_(p) for o, p in zip(out, pulled, strict=True))


def _damped(gram: Tensor, damping: float) -> Tensor:
    mean = gram.diagonal(dim1=-2, dim2=-1).mean(-1)
    return gram + damping * mean[..., None, None] * torch.eye(gram.shape[-1], dtype=gram.dtype)


def _power(x: Tensor, exponent: float) -> Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.pow(exponent).unsqueeze(-2)) @ vectors.mT
