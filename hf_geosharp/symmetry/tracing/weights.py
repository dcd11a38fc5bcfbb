"""Weights of linear maps: which part of which parameter a tensor is, or which parts of which it is made of.

Code may copy parameters before it uses them: put together, reordered, in another precision, times a number. Every entry
of the copy is then one entry of a parameter, and a linear map with the copy is one with the parameters whose outputs
are put together, and in order, in the same way.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from hf_geosharp.symmetry.tracing.copies import SOURCES, Index, Layout, ravel, unravel, within


@dataclass(frozen=True)
class Slab:
    """The part of a parameter that a linear map uses: indices start[d], start[d] + 1, ... along each dimension.

    ``out`` and ``inner`` are the dimensions that count outputs and inputs (several: together, the last one fastest);
    other dimensions have one index. ``shape`` is the parameter's.
    """

    parameter: str
    out: tuple[int, ...]
    inner: tuple[int, ...]
    start: tuple[int, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Part:
    """Outputs of a linear map that one parameter makes: ``rows`` of them are ``features`` of the slab's.

    ``exact`` if the entries are those of the parameter but for rounding: not times a number, or masked.
    """

    slab: Slab
    rows: Tensor
    features: Tensor
    exact: bool = True


@dataclass(frozen=True, eq=False)
class Made:
    """How a tensor was made of parameters: the call, what it does to their entries, and where it put them.

    ``version`` is the state of the memory then: what is written there later is not known.
    """

    kind: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    version: int
    place: Layout


_KEPT = {
    torch.clone, Tensor.clone, Tensor.contiguous, Tensor.to, Tensor.type, Tensor.type_as, Tensor.float, Tensor.double,
    Tensor.half, Tensor.bfloat16, torch.mul, torch.multiply, Tensor.mul, Tensor.multiply, Tensor.__mul__,
    Tensor.__rmul__, torch.div, torch.true_divide, Tensor.div, Tensor.__truediv__, Tensor.neg, Tensor.__neg__,
}  # fmt: skip
"""Every entry stays in its place, but for a constant factor."""

_SUMS = {torch.add, Tensor.add, Tensor.__add__, torch.sub, Tensor.sub, Tensor.__sub__}
_PRODUCTS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}

_ROUNDING = 1e-2
"""Relative difference of an entry from its copy in half precision that is none."""

_BLOCK = 1 << 18
"""Entries of a copy that are looked up at once."""


def _tensors(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for own in x:
            yield from _tensors(own)


class Weights:
    """Tells the parameters of a model by their memory, and what is made of them alone by how it was made."""

    def __init__(self, owners: Mapping[int, list[tuple[str, Tensor]]]) -> None:
        """``owners`` has the names and parameters of each storage."""
        self._owners = owners
        self._made: WeakIdKeyDictionary = WeakIdKeyDictionary()
        everything = [both for own in owners.values() for both in own]
        self._names = [name for name, _ in everything]
        self._begin = dict(zip(self._names, _sums(p.numel() for _, p in everything), strict=True))
        self._parameters = dict(everything)
        self._shapes = {name: tuple(p.shape) for name, p in everything}

    def owned(self, tensor: Tensor) -> bool | None:
        """Whether a tensor is (a view of) a parameter; None where that cannot be told."""
        try:
            return tensor.untyped_storage().data_ptr() in self._owners
        except (NotImplementedError, RuntimeError):
            return None  # within vmap: no memory

    def known(self, tensor: Tensor) -> bool | None:
        """Whether it is (a view of) a parameter, or of what is made of parameters alone."""
        owned = self.owned(tensor)
        return owned if owned is not False else self._recipe(tensor) is not None

    def note(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Remembers how a tensor was made, if it is made of parameters alone."""
        kind = _kind(func, args, kwargs, result)
        if not kind or self.known(result) is not False or result.numel() != _root(result).numel():
            return
        moving = [t for t in _tensors(args) if t.requires_grad]
        if not moving or not all(self.known(t) for t in moving):
            return
        if kind == "kept" and (len(moving) != 1 or moving[0].shape != result.shape):
            return
        if kind in ("sum", "product") and (len(moving) != 2 or any(t.ndim != 2 for t in moving)):
            return
        self._made[_root(result)] = Made(kind, func, args, kwargs, result._version, _layout(result))

    def _recipe(self, tensor: Tensor) -> Made | None:
        made: Made | None = self._made.get(_root(tensor))
        return made if made is not None and made.version == tensor._version else None

    def expression(self, matrix: Tensor) -> tuple[Made, bool] | None:
        """How a matrix is made that is more than copied, and whether it was turned since: a sum, a product."""
        made = self._recipe(matrix) if matrix.ndim == 2 else None
        if made is None or made.kind == "moved":
            return None
        if made.kind == "kept":
            tensors = list(_tensors(made.args))
            if any(self.expression(t) is None for t in tensors if t.requires_grad):
                return None
            if any(t.numel() > 1 for t in tensors if not t.requires_grad):
                return None
        if _layout(matrix) == made.place:
            return made, False
        return (made, True) if _layout(matrix.mT) == made.place else None

    def parts(self, weight: Tensor, out: Sequence[int], inner: Sequence[int]) -> list[Part] | None:
        """Which features of which parameters a linear map with a copy writes; None where that cannot be told."""
        if not weight.numel() or not self.known(weight):
            return None
        sizes = [[weight.shape[a] for a in axes] for axes in (out, inner)]
        count, columns = (math.prod(own) for own in sizes)
        if columns < 2:
            return None

        def index(rows: Tensor, read: Tensor) -> Index:
            both = (*unravel(rows.view(-1, 1), sizes[0]), *unravel(read.view(1, -1), sizes[1]))
            return tuple(i for _, i in sorted(zip((*out, *inner), both, strict=True), key=lambda own: own[0]))

        everything = torch.arange(columns)
        first = self._entries(weight, index(torch.arange(count), everything[:1]))
        if first is None or int(first.min()) < 0:
            return None
        first = first.expand(count, 1)
        begins = torch.tensor([self._begin[name] for name in self._names])
        owner = (torch.bucketize(first, begins, right=True) - 1).flatten()
        parts = []
        for which in owner.unique().tolist():
            rows, name = (owner == which).nonzero().flatten(), self._names[which]
            pattern, exact = self._entries(weight, index(rows[:1], everything)), True
            if pattern is None or int(pattern.min()) < 0:
                return None
            pattern = (pattern - first[rows[0]]).view(-1)
            for some in rows.split(max(1, _BLOCK // columns)):
                at = index(some, everything)
                table = self._entries(weight, at)
                if table is None or not torch.equal(table.expand(len(some), columns), first[some] + pattern):
                    return None
                exact = exact and self._copied(weight.detach()[at], name, table - self._begin[name])
            part = self._part(name, rows, first[rows, 0] - self._begin[name], pattern)
            if part is None:
                return None
            parts.append(replace(part, exact=exact))
        return parts

    def _copied(self, values: Tensor, name: str, entries: Tensor) -> bool:
        """Whether values are entries of a parameter but for rounding."""
        parameter = self._parameters[name].detach().view(-1)
        own = parameter[entries.to(parameter.device)]
        return torch.allclose(values.cpu().double(), own.cpu().double(), rtol=_ROUNDING, atol=0.0)

    def _part(self, name: str, rows: Tensor, first: Tensor, pattern: Tensor) -> Part | None:
        """Rows of entries of one parameter as features of it; None where they are no linear map's.

        ``first`` has where each row begins, ``pattern`` where its entries lie from there.
        """
        shape = self._shapes[name]
        if int(first.max() + pattern.max()) >= math.prod(shape) or int(first.min() + pattern.min()) < 0:
            return None
        across = unravel(first[0] + pattern, shape)
        inner = tuple(d for d, index in enumerate(across) if bool((index != index[0]).any()))
        along = unravel(first, shape)
        out = tuple(d for d, index in enumerate(along) if d not in inner and bool((index != index[0]).any()))
        if not out:
            out = tuple(d for d, n in enumerate(shape) if d not in inner and n > 1)[-1:]
        if not inner or not out or any(bool((along[d] != along[d][0]).any()) for d in inner):
            return None
        read = ravel([across[d] for d in inner], [shape[d] for d in inner])
        if not torch.equal(read, torch.arange(len(read)) + read[0]) or (len(inner) > 1 and int(read[0])):
            return None
        if len(inner) > 1 and len(read) != math.prod(shape[d] for d in inner):
            return None
        written = ravel([along[d] for d in out], [shape[d] for d in out])
        begin = int(written.min()) if len(out) == 1 else 0
        start = [int(index[0]) for index in along]
        for d in out:
            start[d] = begin
        for d in inner:
            start[d] = int(read[0]) if len(inner) == 1 else 0
        return Part(Slab(name, out, inner, tuple(start), shape), rows, written - begin)

    def vector(self, bias: Tensor, part: Part) -> Slab | None:
        """Where in a parameter the entries of a bias lie that belong to a part, in the order of its features."""
        own = self._entries(bias, (part.rows,)) if bias.ndim == 1 else None
        if own is None:
            return None
        own = own.expand(len(part.rows))
        name = self._names[bisect_right([self._begin[n] for n in self._names], int(own[0])) - 1]
        shifts = own - self._begin[name] - part.features
        if int(own.min()) < self._begin[name] or len(self._shapes[name]) != 1 or bool((shifts != shifts[0]).any()):
            return None
        if int(own.max()) >= self._begin[name] + self._shapes[name][0]:
            return None
        return Slab(name, (0,), (), (int(shifts[0]),), self._shapes[name])

    def _entries(self, tensor: Tensor, index: Index) -> Tensor | None:
        """The numbers of the entries that some are copies of, all parameters numbered in a row; -1 for constants."""
        if self.owned(tensor):
            return self._numbers(tensor, index)
        made = self._recipe(tensor)
        if made is None:
            return None if tensor.requires_grad else torch.tensor(-1)
        if made.kind not in ("kept", "moved"):
            return None
        index = within(index, _layout(tensor), made.place)
        if made.kind == "kept":
            (of,) = (t for t in _tensors(made.args) if t.requires_grad)
            return self._entries(of, index)
        whole = torch.tensor(-1)
        for operand, where, own in SOURCES[made.func](made.place[0], index, *made.args, **made.kwargs):
            if where is not None and not bool(where.any()):
                continue
            numbers = self._entries(operand, own)
            if numbers is None:
                return None
            whole = numbers if where is None or bool(where.all()) else torch.where(where, numbers, whole)
        return whole

    def _numbers(self, tensor: Tensor, index: Index) -> Tensor | None:
        for name, p in self._owners[tensor.untyped_storage().data_ptr()]:
            offset = int(tensor.storage_offset() - p.storage_offset())
            if 0 <= offset < p.numel() and p.is_contiguous():
                numbers = torch.tensor(offset + self._begin[name])
                for i, stride in zip(index, tensor.stride(), strict=True):
                    numbers = numbers + i * stride
                return numbers
        return None

    def slab(self, tensor: Tensor, out: Sequence[int], inner: Sequence[int]) -> Slab | None:
        """Where in a parameter a view of it lies, if its axes are dimensions of the parameter."""
        for name, p in self._owners.get(tensor.untyped_storage().data_ptr(), ()):
            offset = int(tensor.storage_offset() - p.storage_offset())
            if not 0 <= offset < max(p.numel(), 1):
                continue
            dims: dict[int, int] = {}
            for axis in (*out, *inner):
                fits = [
                    d
                    for d in range(p.ndim)
                    if (p.stride(d) == tensor.stride(axis) or tensor.shape[axis] == 1)
                    and p.shape[d] >= tensor.shape[axis]
                    and d not in dims.values()
                ]
                if not fits:
                    break
                dims[axis] = fits[0]
            else:
                start, rest = [0] * p.ndim, offset
                for d in sorted(range(p.ndim), key=p.stride, reverse=True):
                    start[d], rest = divmod(rest, p.stride(d))
                several = [d for axes in (out, inner) if len(axes) > 1 for d in (dims[a] for a in axes)]
                if rest == 0 and not any(start[d] for d in several):
                    return Slab(
                        name, tuple(dims[a] for a in out), tuple(dims[a] for a in inner), tuple(start), tuple(p.shape)
                    )
        return None


def _root(tensor: Tensor) -> Tensor:
    """What a view is a view of."""
    return tensor if tensor._base is None else tensor._base


def _layout(tensor: Tensor) -> Layout:
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


def _kind(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> str:
    """What a call does to entries of parameters; "" where none of this."""
    if not isinstance(result, Tensor) or not result.requires_grad or not result.is_floating_point():
        return ""
    if func in _KEPT:
        return "kept"
    if func in SOURCES:
        return "moved"
    if func in _SUMS and not kwargs and len(args) == 2:
        return "sum"
    return "product" if func in _PRODUCTS and not kwargs and len(args) == 2 else ""


def _sums(sizes: Iterator[int]) -> list[int]:
    out = [0]
    for size in sizes:
        out.append(out[-1] + size)
    return out[:-1]
