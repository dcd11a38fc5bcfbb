"""A part of a parameter seen as (copies, d, rows): slices, transposes, fused layouts and stacked groups, as data.

A view is written as a pattern over the parameter's axes. ``(n g h) i`` is a query weight of n key heads with g query
heads each; of ``i (s n h)``, s = 1 selects the keys of a fused and transposed projection. Reading and writing go
through strided views of the parameter's own storage, so that a write perturbs the model in place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import field as dataclass_field

import torch
from torch import Tensor

_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


def parse(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The axis names of each dimension: ``(n h) i`` -> (("n", "h"), ("i",))."""
    return tuple(tuple((m[1] if m[1] is not None else m[2]).split()) for m in _TOKEN.finditer(pattern))


@dataclass(frozen=True)
class View:
    """A strided window on one parameter.

    Attributes:
        parameter: its name in ``model.named_parameters()``.
        axes: the axis names of each of its dimensions.
        sizes: the size of every axis.
        copies, dim, rows: which axes count copies, which is the d of the pair (none: d = 1), which are its rows.
        field: the axis of size 2 that holds real and imaginary part, or "".
        select: axes of which one index is taken.
        narrow: (dimension, start, length) cut out before the axes are split.
    """

    parameter: str
    axes: tuple[tuple[str, ...], ...]
    sizes: Mapping[str, int]
    copies: tuple[str, ...]
    dim: tuple[str, ...]
    rows: tuple[str, ...]
    field: str = ""
    select: Mapping[str, int] = dataclass_field(default_factory=dict)
    narrow: tuple[tuple[int, int, int], ...] = ()

    def _size(self, names: Sequence[str]) -> int:
        return math.prod(self.sizes[a] for a in names)

    @property
    def count(self) -> int:
        """Number of copies."""
        return self._size(self.copies)

    @property
    def width(self) -> int:
        """The d of the pair."""
        return self._size(self.dim)

    @property
    def height(self) -> int:
        """Number of rows that this view contributes to its factor."""
        return self._size(self.rows)

    def of(self, tensor: Tensor) -> Tensor:
        """The window on ``tensor`` (of the parameter's shape): (*copies, *dim, *rows[, 2]), sharing its storage."""
        for dimension, start, length in self.narrow:
            tensor = tensor.narrow(dimension, start, length)
        at = 0
        for names in self.axes:
            if len(names) != 1:
                tensor = tensor.unflatten(at, [self.sizes[a] for a in names]) if names else tensor.squeeze(at)
            at += len(names)
        order = [a for group in self.axes for a in group]
        for axis, index in self.select.items():
            tensor = tensor.select(order.index(axis), index)
            order.remove(axis)
        wanted = [*self.copies, *self.dim, *self.rows, *([self.field] if self.field else [])]
        return tensor.permute([order.index(a) for a in wanted])

    def shape(self) -> list[int]:
        """Sizes of the axes of :meth:`of`."""
        wanted = [*self.copies, *self.dim, *self.rows, *([self.field] if self.field else [])]
        return [self.sizes[a] for a in wanted]

    def split(self, axis: str, into: Sequence[str], sizes: Mapping[str, int]) -> View:
        """The same view with one axis written as several; ``sizes`` gives the sizes of the new ones.

        The new axes take the old one's place among the parameter's axes; which of them are copies, dim or field is
        for the caller to say with :func:`dataclasses.replace`.
        """
        axes = tuple(tuple(b for a in names for b in (into if a == axis else (a,))) for names in self.axes)
        return replace(self, axes=axes, sizes={**self.sizes, **sizes})


@dataclass(frozen=True)
class Window:
    """A view worked out for tensors of one shape and strides: opening it is a single operation.

    Attributes:
        size, stride, offset: of the window, the offset from the tensor's own.
        within: shape and strides of the tensors it is for.
    """

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    within: tuple[tuple[int, ...], tuple[int, ...]]

    @staticmethod
    def between(tensor: Tensor, part: Tensor) -> Window:
        """The window through which ``part``, a view of ``tensor``, is seen."""
        offset = int(part.storage_offset() - tensor.storage_offset())
        return Window(tuple(part.shape), part.stride(), offset, (tuple(tensor.shape), tensor.stride()))

    def fits(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in memory as the window wants it."""
        return self.within == (tuple(tensor.shape), tensor.stride())

    def of(self, tensor: Tensor) -> Tensor:
        """The window on a tensor that it fits."""
        return tensor.as_strided(self.size, self.stride, int(tensor.storage_offset()) + self.offset)


def windows(views: Sequence[View], tensors: Mapping[str, Tensor], factor: Tensor) -> list[tuple[Window, Window]]:
    """For each view its window on its parameter, and on its rows of ``factor`` (copies, d, rows).

    A complex factor is seen as real numbers, (copies, d, rows, 2).
    """
    out, row = [], 0
    for view in views:
        tensor, block = tensors[view.parameter], _block(view, factor, row)
        whole = torch.view_as_real(factor) if view.field else factor
        out.append((Window.between(tensor, view.of(tensor)), Window.between(whole, block)))
        row += view.height
    return out


def read(views: Sequence[View], tensors: Mapping[str, Tensor], out: Tensor) -> Tensor:
    """Gathers a factor's views into ``out`` (copies, d, rows), real or complex; rows of the views stack."""
    row = 0
    for view in views:
        block = _block(view, out, row)
        block.copy_(view.of(tensors[view.parameter]))
        row += view.height
    return out


def write(views: Sequence[View], tensors: Mapping[str, Tensor], source: Tensor) -> None:
    """Scatters a factor (copies, d, rows) into the parameters, in place; the inverse of :func:`read`."""
    row, source = 0, source.resolve_conj()
    for view in views:
        view.of(tensors[view.parameter]).copy_(_block(view, source, row))
        row += view.height


def _block(view: View, factor: Tensor, row: int) -> Tensor:
    """The rows of ``factor`` that belong to ``view``, with the view's own axes (a view of ``factor``)."""
    block = factor[:, :, row : row + view.height]
    if view.field:
        block = torch.view_as_real(block)
    # Splitting dimensions is always possible without a copy, whatever the strides.
    block = block.unflatten(2, [view.sizes[a] for a in view.rows]) if view.rows else block.squeeze(2)
    block = block.unflatten(1, [view.sizes[a] for a in view.dim]) if view.dim else block.squeeze(1)
    return block.unflatten(0, [view.sizes[a] for a in view.copies]) if view.copies else block.squeeze(0)


def shape_of(views: Sequence[View]) -> tuple[int, int, int]:
    """(copies, d, rows) of a factor.

    Raises:
        ValueError: the views do not agree in copies or d.
    """
    heads = {(v.count, v.width, bool(v.field)) for v in views}
    if len(heads) != 1:
        raise ValueError(f"the views of one factor disagree: {[(v.parameter, v.count, v.width) for v in views]}")
    count, width, _ = next(iter(heads))
    return count, width, sum(v.height for v in views)
