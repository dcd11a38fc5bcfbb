"""Features of linear maps, and entries of parameters, as the nodes of what is read off a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_geosharp.symmetry.tracing.events import Linear

Node = tuple[int, int]
"""A feature: which family, and which index in it."""


NEAR = 1e-3
"""Size, relative to its terms, of a sum that is taken for zero: what is made of it is proved on the model."""


def drawn(shape: Sequence[int], like: Tensor, seed: int) -> Tensor:
    """Random numbers from 0.5 to 1.5, the same each time: weighted by them terms of a sum do not cancel by chance."""
    return (torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed)) + 0.5).to(like)


def cancels(rows: Tensor) -> bool:
    """Whether each row (the last axis) sums to zero, but for rounding in the precision that it has.

    Rounding errors of numbers of one size add up like a random walk.
    """
    near = max(NEAR, 8 * torch.finfo(rows.dtype).eps / max(rows.shape[-1], 1) ** 0.5)
    return bool((rows.sum(-1).abs() <= near * rows.abs().sum(-1)).all())


def only(weights: Tensor, axis: int, index: int) -> Tensor:
    """Weights at one index of an axis, and zeros elsewhere."""
    mask = torch.zeros_like(weights)
    mask.select(axis, index).copy_(weights.select(axis, index))
    return mask


@dataclass(frozen=True)
class Family:
    """Features of one kind: outputs (or inputs) of linear maps, or entries of a parameter that is used by itself.

    Attributes:
        parameter: its name.
        dimensions: which of its dimensions count the features (several: together, the last one fastest).
        across: which are its rows; none for entries.
        start: where the linear map's part of the parameter begins in the other dimensions.
        rows: how many rows there are.
        shape: of the parameter.
        bias: the parameter and index of the bias of feature 0.
    """

    parameter: str
    dimensions: tuple[int, ...]
    across: tuple[int, ...]
    start: tuple[int, ...]
    rows: int
    shape: tuple[int, ...]
    bias: tuple[str, int] | None = None


@dataclass(eq=False)
class Port:
    """A tensor of the graph whose features take part: which family they are of, and where its first is in it."""

    tensor: Tensor
    axis: int | None
    family: int
    first: int

    def features(self, gradient: Tensor | None) -> Tensor:
        """Which features have a derivative that is not zero anywhere: (features,) booleans."""
        return self.sizes(gradient) != 0

    def sizes(self, gradient: Tensor | None) -> Tensor:
        """Largest modulus of the derivative of each feature, (features,)."""
        if gradient is None:
            return torch.zeros(self.count)
        if self.axis is None:
            return gradient.detach().abs().flatten()
        rows = gradient.detach().abs().movedim(self.axis, -1).flatten(0, -2)
        # An expert may be called without a token.
        return rows.amax(0) if len(rows) else rows.new_zeros(rows.shape[-1])

    def sums(self, gradient: Tensor | None) -> Tensor:
        """Sum of the derivative over everything but features, (features,)."""
        if gradient is None:
            return torch.zeros(self.count)
        if self.axis is None:
            return gradient.detach().flatten()
        return gradient.detach().movedim(self.axis, -1).flatten(0, -2).sum(0)

    @property
    def count(self) -> int:
        """How many features it has."""
        return self.tensor.numel() if self.axis is None else self.tensor.shape[self.axis]

    def one_hot(self, features: Sequence[int]) -> Tensor:
        """Ones at these features, everywhere."""
        out = torch.zeros_like(self.tensor)
        if self.axis is None:
            out.view(-1)[list(features)] = 1
        else:
            out.movedim(self.axis, -1)[..., list(features)] = 1
        return out


class Families:
    """The families of a model, each once: maps that share a parameter have features in common."""

    def __init__(self) -> None:
        self.members: list[Family] = []
        self._index: dict[Family, int] = {}

    def outputs(self, linear: Linear) -> tuple[int, int]:
        """(family, index of the first feature) of what a linear map writes."""
        slab = linear.weight
        first = slab.start[slab.out[0]] if len(slab.out) == 1 else 0
        start = tuple(0 if d in slab.out else s for d, s in enumerate(slab.start))
        bias = None
        if linear.bias is not None:
            bias = linear.bias.parameter, linear.bias.start[0] - first
        return self._add(Family(slab.parameter, slab.out, slab.inner, start, linear.inputs, slab.shape, bias)), first

    def inputs(self, linear: Linear) -> tuple[int, int] | None:
        """The same of what it reads; None where not every output reads every input."""
        slab = linear.weight
        if linear.grouped:
            return None
        first = slab.start[slab.inner[0]] if len(slab.inner) == 1 else 0
        start = tuple(0 if d in slab.inner else s for d, s in enumerate(slab.start))
        return self._add(Family(slab.parameter, slab.inner, slab.out, start, linear.outputs, slab.shape)), first

    def along(self, family: int) -> tuple[int | None, int]:
        """The family that has these features together with those of other matrices of the parameter, and their shift.

        The matrices lie along its first dimension; None where there is no other dimension, or several, or a bias.
        """
        own = self.members[family]
        other = [d for d in range(len(own.shape)) if d not in (*own.dimensions, *own.across)]
        if len(other) != 1 or own.bias is not None:
            return None, 0
        shift = own.start[other[0]] * math.prod(own.shape[d] for d in own.dimensions)
        start = tuple(0 if d in other else s for d, s in enumerate(own.start))
        return self._add(replace(own, dimensions=(other[0], *own.dimensions), start=start)), shift

    def entries(self, name: str, parameter: Tensor) -> int:
        """Family of a parameter's own entries."""
        everything = tuple(range(parameter.ndim))
        return self._add(Family(name, everything, (), (0,) * parameter.ndim, 1, tuple(parameter.shape)))

    def _add(self, family: Family) -> int:
        if family not in self._index:
            self._index[family] = len(self.members)
            self.members.append(family)
        return self._index[family]
