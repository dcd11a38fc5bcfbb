"""The product of all pairs and loose parameters: one norm, one ball, one map from tangent vectors to points.

A tangent vector of the whole space has a flat real piece of coordinates for each part. In these coordinates the metric
is Euclidean, so the ball is a plain ball, and whoever climbs needs to know nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.geometry.metrics import Frame, Order, Tensors

_CHUNK = 1 << 18
"""Entries worked on at a time: what several vectors have of them fits a cache. As many products are summed in the
working precision; sums of sums are in double."""


@dataclass(frozen=True)
class Tangent:
    """A tangent vector: the flat coordinates of each part. In-place methods end in an underscore."""

    pieces: tuple[Tensor, ...]

    def piece(self, part: int, out: Tensor | None = None) -> Tensor:
        """Its coordinates in one part; ``out`` is memory for vectors that have to be worked out."""
        return self.pieces[part]

    def chunk(self, part: int, where: slice) -> Tensor:
        """Some of its coordinates in one part."""
        return self.pieces[part][where]

    def clone(self) -> Tangent:
        """A copy with memory of its own."""
        return Tangent(tuple(p.clone() for p in self.pieces))

    def mul_(self, factor: float) -> Tangent:
        """Scales it."""
        for piece in self.pieces:
            piece.mul_(factor)
        return self

    def flat(self) -> Tensor:
        """All coordinates in one tensor, copied."""
        return torch.cat([p.reshape(-1) for p in self.pieces])


@dataclass(frozen=True)
class Part:
    """A batch of pairs, or one loose parameter.

    ``shapes`` are those of its coordinates as they lie in memory: (copies, d, rows) for the factors of pairs, so
    that the rows of a linear layer stay contiguous; (1, n) for a loose parameter. ``order`` is the geodesic's.
    ``device`` is where it lies, if not where the space does: a model may be spread over several.
    """

    name: str
    frame: Frame
    shapes: tuple[tuple[int, ...], ...]
    complex: bool
    order: Order
    device: torch.device | None = None

    @property
    def numel(self) -> int:
        """How many real coordinates it has."""
        return sum(math.prod(s) for s in self.shapes) * (2 if self.complex else 1)

    def split(self, piece: Tensor) -> Tensors:
        """Its piece of a tangent vector as the frame wants it: (copies, rows, d) for pairs; views, not copies."""
        return tuple(x.mT if x.ndim == 3 else x for x in self.storage(piece))

    def storage(self, piece: Tensor) -> Tensors:
        """The same as it lies in memory, with ``shapes``."""
        out, at = [], 0
        for shape in self.shapes:
            n = math.prod(shape) * (2 if self.complex else 1)
            cut = piece[at : at + n]
            out.append(torch.view_as_complex(cut.view(*shape, 2)) if self.complex else cut.view(shape))
            at += n
        return tuple(out)


@dataclass
class Recipe:
    """factor · Σ coefficient · vector, the same to the last bit each time it is worked out.

    It stands for a tangent vector that is not kept: whoever needs its coordinates gets those of one part at a time.
    Once it has been kept after all (:meth:`Space.keep`), ``kept`` is that vector, and what made it is forgotten.
    """

    terms: tuple[tuple[Tangent, float], ...]
    factor: float = 1.0
    kept: Tangent | None = None

    def piece(self, part: int, out: Tensor | None = None) -> Tensor:
        """Its coordinates in one part, to be read only; in ``out`` if they have to be worked out."""
        if self.kept is not None:
            return self.kept.pieces[part]
        out = torch.empty_like(self.terms[0][0].pieces[part]) if out is None else out
        for where in _chunks(out.numel()):
            self.put(part, where, out[where])
        return out

    def chunk(self, part: int, where: slice) -> Tensor:
        """Some of its coordinates in one part, to be read only."""
        if self.kept is not None:
            return self.kept.chunk(part, where)
        return self.put(part, where, torch.empty_like(self.terms[0][0].pieces[part][where]))

    def put(self, part: int, where: slice, out: Tensor) -> Tensor:
        """Works out some coordinates of one part in ``out``, which may be those of the first vector."""
        (first, a), rest = self.terms[0], self.terms[1:]
        here = first.pieces[part][where]
        if here.data_ptr() != out.data_ptr():
            torch.mul(here, a, out=out)
        elif a != 1.0:
            out.mul_(a)
        for vector, coefficient in rest:
            out.add_(vector.pieces[part][where], alpha=coefficient)
        return out if self.factor == 1.0 else out.mul_(self.factor)


@dataclass(frozen=True)
class Sum:
    """A recipe worked out in ``out``, which is none of its vectors but possibly the first."""

    out: Tangent
    recipe: Recipe

    @staticmethod
    def of(out: Tangent, *terms: tuple[Tangent, float]) -> Sum:
        """Σ coefficient · vector."""
        return Sum(out, Recipe(terms))

    def put(self, part: int, where: slice) -> None:
        """Works out some coordinates of one part."""
        self.recipe.put(part, where, self.out.pieces[part][where])


Vector = Tangent | Recipe
"""A tangent vector, kept or not."""


def _chunks(count: int) -> Iterator[slice]:
    return (slice(start, start + _CHUNK) for start in range(0, count, _CHUNK))


class Space:
    """A point of the quotient with everything needed to leave it: parts, their tangent vectors, the inner product."""

    def __init__(self, parts: Sequence[Part], dtype: torch.dtype, device: torch.device) -> None:
        self.parts = tuple(parts)
        self.dtype, self.device = dtype, device

    def place(self, part: Part) -> torch.device:
        """The device that a part lies on."""
        return part.device or self.device

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return sum(p.numel for p in self.parts)

    @property
    def dimension(self) -> int:
        """Dimension of the horizontal space: the directions that can move the function."""
        return sum(p.frame.dimension for p in self.parts)

    def zeros(self) -> Tangent:
        """The zero tangent vector."""
        return Tangent(tuple(torch.zeros(p.numel, dtype=self.dtype, device=self.place(p)) for p in self.parts))

    def unflatten(self, flat: Tensor) -> Tangent:
        """The tangent vector with these coordinates, (size,); the inverse of :meth:`Tangent.flat`."""
        return Tangent(tuple(x.clone() for x in flat.split([p.numel for p in self.parts])))

    def slices(self, u: Tangent) -> Iterator[tuple[Part, Tensor]]:
        """Each part with its piece of u."""
        return zip(self.parts, u.pieces, strict=True)

    def sweep(self, sums: Sequence[Sum], products: Sequence[tuple[Vector, Vector]] = ()) -> list[float]:
        """Works out the sums, in this order, then ⟨u, v⟩ of each pair of vectors, all in one walk over the coordinates.

        What several sums and products need is so read from memory once.
        """
        found: list[Tensor] = []
        for i, part in enumerate(self.parts):
            here = self.place(part) == self.device
            for where in _chunks(part.numel):
                for wanted in sums:
                    wanted.put(i, where)
                dots = [_dot(u, v, i, where) for u, v in products]
                found += dots if here else [x.to(self.device) for x in dots]
        if not found:
            return [0.0] * len(products)
        return [float(x) for x in torch.stack(found).double().view(-1, len(products)).sum(0).tolist()]

    def dots(self, *pairs: tuple[Tangent, Tangent]) -> list[float]:
        """⟨u, v⟩ of each pair of tangent vectors, summed in double precision over chunks."""
        return self.sweep((), pairs)

    def dot(self, u: Tangent, v: Tangent) -> float:
        """⟨u, v⟩."""
        return self.dots((u, v))[0]

    def norm(self, u: Tangent) -> float:
        """‖u‖."""
        return math.sqrt(self.dot(u, u))

    def empty(self) -> Tangent:
        """Memory for a tangent vector, with whatever is in it."""
        return Tangent(tuple(torch.empty(p.numel, dtype=self.dtype, device=self.place(p)) for p in self.parts))

    def combine(self, out: Tangent, *terms: tuple[Tangent, float]) -> Tangent:
        """out <- Σ coefficient · vector; ``out`` is none of the vectors but possibly the first."""
        self.sweep((Sum.of(out, *terms),))
        return out

    def keep(self, recipe: Recipe, out: Tangent) -> Tangent:
        """Works out in ``out``, which may be its first vector, what the recipe stands for, from now on as that."""
        self.sweep((Sum(out, recipe),))
        recipe.terms, recipe.factor, recipe.kept = (), 1.0, out
        return out

    def horizontal_(self, u: Tangent) -> Tangent:
        """Makes u horizontal, in place, and removes directions that the point does not have."""
        for part, piece in self.slices(u):
            views = part.split(piece)
            for target, value in zip(views, part.frame.horizontal(part.frame.clip(views)), strict=True):
                target.copy_(value)
        return u

    def random(self, generator: torch.Generator) -> Tangent:
        """A standard Gaussian tangent vector, horizontal: E‖u‖² is :attr:`dimension`.

        Drawn on the CPU, so that it does not depend on the device.
        """
        pieces = []
        for part in self.parts:
            noise = torch.randn(part.numel, dtype=torch.float64, generator=generator)
            pieces.append(noise.to(self.place(part), self.dtype))
        return self.horizontal_(Tangent(tuple(pieces)))


def _dot(u: Vector, v: Vector, part: int, where: slice) -> Tensor:
    left = u.chunk(part, where)
    return torch.dot(left, left if v is u else v.chunk(part, where))
