"""The product of all pairs and loose parameters: one norm, one ball, one map from tangent vectors to points.

A tangent vector of the whole space is one flat real tensor of coordinates u; each part owns a slice of it. In these
coordinates the metric is Euclidean, so the ball is a plain ball, and whoever climbs needs to know nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.geometry.metrics import Frame, Order, Tensors

_CHUNK = 1 << 18
"""Entries worked on at a time: what several vectors have of them fits a cache."""


@dataclass(frozen=True)
class Part:
    """A batch of pairs, or one loose parameter.

    ``shapes`` are those of its coordinates as they lie in memory: (copies, d, rows) for the factors of pairs, so
    that the rows of a linear layer stay contiguous; (1, n) for a loose parameter. ``order`` is the geodesic's.
    """

    name: str
    frame: Frame
    shapes: tuple[tuple[int, ...], ...]
    complex: bool
    order: Order

    @property
    def numel(self) -> int:
        """How many real coordinates it has."""
        return sum(math.prod(s) for s in self.shapes) * (2 if self.complex else 1)

    def split(self, flat: Tensor) -> Tensors:
        """Its slice of a tangent vector as the frame wants it: (copies, rows, d) for pairs; views, not copies."""
        out = []
        for shape, piece in zip(self.shapes, self.storage(flat), strict=True):
            out.append(piece.mT if len(shape) == 3 else piece)
        return tuple(out)

    def storage(self, flat: Tensor) -> Tensors:
        """The same as it lies in memory, with ``shapes``."""
        out, at = [], 0
        for shape in self.shapes:
            n = math.prod(shape) * (2 if self.complex else 1)
            piece = flat[at : at + n]
            out.append(torch.view_as_complex(piece.view(*shape, 2)) if self.complex else piece.view(shape))
            at += n
        return tuple(out)


class Space:
    """A point of the quotient with everything needed to leave it: parts, their slices, and the inner product."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        self.parts = tuple(parts)
        self.dtype, self.device = dtype, device
        self.offsets = [0]
        for part in parts:
            self.offsets.append(self.offsets[-1] + part.numel)

    @property
    def size(self) -> int:
        """Length of a tangent vector."""
        return self.offsets[-1]

    @property
    def dimension(self) -> int:
        """Dimension of the horizontal space: the directions that can move the function."""
        return sum(p.frame.dimension for p in self.parts)

    def zeros(self) -> Tensor:
        """The zero tangent vector."""
        return torch.zeros(self.size, dtype=self.dtype, device=self.device)

    def slices(self, u: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its slice of u."""
        for part, start, end in zip(self.parts, self.offsets, self.offsets[1:], strict=False):
            yield part, u[start:end]

    def dots(self, *pairs: tuple[Tensor, Tensor]) -> list[float]:
        """⟨u, v⟩ of each pair of tangent vectors, summed in double precision over chunks."""
        totals = torch.zeros(len(pairs), dtype=torch.float64, device=self.device)
        for start in range(0, pairs[0][0].numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            totals += torch.stack([torch.dot(u[chunk], v[chunk]) for u, v in pairs])
        return [float(x) for x in totals]

    def dot(self, u: Tensor, v: Tensor) -> float:
        """⟨u, v⟩."""
        return self.dots((u, v))[0]

    def combine_(self, out: Tensor, a: float, *terms: tuple[Tensor, float]) -> Tensor:
        """out <- a out + Σ coefficient · vector, in place and chunk by chunk."""
        for start in range(0, out.numel(), _CHUNK):
            chunk = slice(start, start + _CHUNK)
            piece = out[chunk].mul_(a)
            for vector, coefficient in terms:
                piece.add_(vector[chunk], alpha=coefficient)
        return out

    def norm(self, u: Tensor) -> float:
        """‖u‖."""
        return math.sqrt(self.dot(u, u))

    def share(self, u: Tensor) -> dict[str, float]:
        """Part -> its share of ‖u‖²; zeros for u = 0."""
        total = self.dot(u, u) or 1.0
        return {part.name: self.dot(piece, piece) / total for part, piece in self.slices(u)}

    def horizontal_(self, u: Tensor) -> Tensor:
        """Makes u horizontal, in place, and removes directions that the point does not have."""
        for part, piece in self.slices(u):
            views = part.split(piece)
            for target, value in zip(views, part.frame.horizontal(part.frame.clip(views)), strict=True):
                target.copy_(value)
        return u

    def random(self, generator: torch.Generator) -> Tensor:
        """A standard Gaussian tangent vector, horizontal: E‖u‖² is :attr:`dimension`.

        Drawn on the CPU, so that it does not depend on the device.
        """
        u = torch.randn(self.size, dtype=torch.float64, generator=generator)
        return self.horizontal_(u.to(self.device, self.dtype))
