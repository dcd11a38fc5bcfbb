"""A part of a parameter seen as (copies, d, rows): slices, transposes, fused layouts and stacked groups, as data.

A view is a regular window: an index in each of its named axes moves by a fixed step along one dimension of the
parameter. Layouts are often written as a pattern over the parameter's dimensions: ``(n g h) i`` is a query weight of n
key heads with g query heads each; of ``i (s n h)``, s = 1 selects the keys of a fused and transposed projection.
Reading and writing go through strided views of the parameter's own storage, so that a write perturbs the model in
place.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

_TOKEN = re.compile(r"\(([^()]*)\)|(\S+)")


def parse(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The axis names of each dimension: ``(n h) i`` -> (("n", "h"), ("i",))."""
    return tuple(tuple((m[1] if m[1] is not None else m[2]).split()) for m in _TOKEN.finditer(pattern))


@dataclass(frozen=True)
class Axis:
    """``size`` indices, each ``step`` further along one dimension of the parameter."""

    name: str
    size: int
    dimension: int
    step: int


@dataclass(frozen=True)
class View:
    """A regular window on one parameter.

    Attributes:
        parameter: its name in ``model.named_parameters()``.
        axes: the window's axes.
        start: where it begins, along each dimension of the parameter.
        copies, dim, rows: which axes count copies, which is the d of the pair (none: d = 1), which are its rows.
        field: the axis of size 2 that holds real and imaginary part, or "".
        shift: what is added to the parameter's entries: norms that multiply by 1 + weight have 1.
    """

    parameter: str
    axes: tuple[Axis, ...]
    start: tuple[int, ...]
    copies: tuple[str, ...]
    dim: tuple[str, ...]
    rows: tuple[str, ...]
    field: str = ""
    shift: float = 0.0

    @staticmethod
    def pattern(
        parameter: str, pattern: str | Sequence[Sequence[str]], sizes: Mapping[str, int], copies: tuple[str, ...],
        dim: tuple[str, ...], rows: tuple[str, ...], *, select: Mapping[str, int] | None = None,
    ) -> View:  # fmt: skip
        """The view of a whole parameter under a pattern; ``select`` takes one index of an axis."""
        groups = parse(pattern) if isinstance(pattern, str) else pattern
        select = select or {}
        axes, start = [], []
        for dimension, names in enumerate(groups):
            step, at = 1, 0
            for name in reversed(names):
                if name in select:
                    at += select[name] * step
                else:
                    axes.append(Axis(name, sizes[name], dimension, step))
                step *= sizes[name]
            start.append(at)
        return View(parameter, tuple(axes), tuple(start), copies, dim, rows)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of every axis."""
        return {a.name: a.size for a in self.axes}

    def _size(self, names: Sequence[str]) -> int:
        sizes = self.sizes
        return math.prod(sizes[a] for a in names)

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

    @property
    def region(self) -> tuple[str, tuple[int, ...], tuple[tuple[int, int, int], ...]]:
        """What it covers, the same for every way to write the same entries: axes that join are one."""
        joined: list[list[int]] = []
        for axis in sorted(self.axes, key=lambda a: (a.dimension, a.step)):
            if axis.size == 1:
                continue
            last = joined[-1] if joined else None
            if last and last[0] == axis.dimension and last[1] * last[2] == axis.step:
                last[2] *= axis.size
            else:
                joined.append([axis.dimension, axis.step, axis.size])
        return self.parameter, self.start, tuple((d, s, n) for d, s, n in joined)

    def meets(self, other: View) -> bool:
        """Whether both have an entry of a parameter in common: indices of each of its dimensions."""
        if self.parameter != other.parameter:
            return False
        dimensions = range(len(self.start))
        # Most lie apart, experts say: then their ends tell.
        if any(self._last(d) < other.start[d] or other._last(d) < self.start[d] for d in dimensions):
            return False
        return not any(self._indices(d).isdisjoint(other._indices(d)) for d in dimensions)

    def _last(self, dimension: int) -> int:
        """The last index along a dimension."""
        return self.start[dimension] + sum((a.size - 1) * a.step for a in self.axes if a.dimension == dimension)

    def _indices(self, dimension: int) -> set[int]:
        """All indices along a dimension."""
        found = {self.start[dimension]}
        for axis in self.axes:
            if axis.dimension == dimension:
                found = {index + k * axis.step for index in found for k in range(axis.size)}
        return found

    @property
    def layout(self) -> str:
        """The axes of each dimension of the parameter, outermost first: ``(n h) i``."""
        groups = []
        for dimension in range(len(self.start)):
            own = sorted((a for a in self.axes if a.dimension == dimension), key=lambda a: -a.step)
            names = " ".join(a.name for a in own)
            groups.append(names if len(own) == 1 else f"({names})")
        return " ".join(groups)

    def of(self, tensor: Tensor) -> Tensor:
        """The window on ``tensor`` (of the parameter's shape): (*copies, *dim, *rows[, 2]), sharing its storage."""
        axes = {a.name: a for a in self.axes}
        wanted = [axes[n] for n in self.names]
        offset = sum(s * tensor.stride(d) for d, s in enumerate(self.start))
        return tensor.as_strided(
            [a.size for a in wanted],
            [a.step * tensor.stride(a.dimension) for a in wanted],
            int(tensor.storage_offset()) + offset,
        )

    def shape(self) -> list[int]:
        """Sizes of the axes of :meth:`of`."""
        sizes = self.sizes
        return [sizes[n] for n in self.names]

    @property
    def names(self) -> list[str]:
        """The axes of :meth:`of`, in order."""
        return [*self.copies, *self.dim, *self.rows, *([self.field] if self.field else [])]

    def pick(self, axis: str, index: int) -> View:
        """The view with one index of an axis; the axis is gone."""
        old = next(a for a in self.axes if a.name == axis)
        start = tuple(s + index * old.step * (d == old.dimension) for d, s in enumerate(self.start))
        copies, dim, rows = (tuple(n for n in names if n != axis) for names in (self.copies, self.dim, self.rows))
        axes = tuple(a for a in self.axes if a is not old)
        return replace(self, axes=axes, start=start, copies=copies, dim=dim, rows=rows)

    def split(self, axis: str, into: Sequence[str], sizes: Mapping[str, int]) -> View:
        """The same view with one axis written as several; ``sizes`` gives the sizes of the new ones.

        Which of the new axes are copies, dim or field is for the caller to say with :func:`dataclasses.replace`.
        """
        old = next(a for a in self.axes if a.name == axis)
        new, step = [], old.step
        for name in reversed(into):
            new.append(Axis(name, sizes[name], old.dimension, step))
            step *= sizes[name]
        return replace(self, axes=tuple(b for a in self.axes for b in (new if a is old else (a,))))


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
        if view.shift:
            block += view.shift
        row += view.height
    return out


def write(views: Sequence[View], tensors: Mapping[str, Tensor], source: Tensor) -> None:
    """Scatters a factor (copies, d, rows) into the parameters, in place; the inverse of :func:`read`."""
    row, source = 0, source.resolve_conj()
    for view in views:
        target = view.of(tensors[view.parameter])
        target.copy_(_block(view, source, row))
        if view.shift:
            target -= view.shift
        row += view.height


def scale(views: Sequence[View], tensors: Mapping[str, Tensor], numbers: Tensor) -> None:
    """Multiplies each copy of a real factor by its number, in place; ``numbers`` is (copies,)."""
    for view in views:
        target = view.of(tensors[view.parameter])
        own = numbers.to(target).view([view.sizes[a] for a in view.copies] + [1] * (target.ndim - len(view.copies)))
        if view.shift:
            target += view.shift
        target.mul_(own)
        if view.shift:
            target -= view.shift


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
