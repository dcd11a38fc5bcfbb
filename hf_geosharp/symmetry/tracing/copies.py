"""Copies: which entry of which operand each entry of a result is, for functions that only move entries.

An index is a tensor of positions for each dimension; together they broadcast to the shape that is asked for. Rows and
columns that a function keeps apart stay apart, so that no table of all entries is made.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

Index = tuple[Tensor, ...]
Sources = Iterator[tuple[Tensor, Tensor | None, Index]]
"""Operands, where the result is made of them (None: everywhere), and the entries of theirs that it is."""

Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset of a tensor in its memory."""


def ravel(index: Sequence[Tensor], shape: Sequence[int]) -> Tensor:
    """The position of entries when a tensor's are counted in order."""
    whole = torch.zeros((), dtype=torch.long)
    for i, size in zip(index, shape, strict=True):
        whole = whole * size + i
    return whole


def unravel(positions: Tensor, shape: Sequence[int]) -> Index:
    """The index of entries that are counted in order."""
    index = []
    for size in reversed(shape):
        index.append(positions % size)
        positions = positions // size
    return tuple(reversed(index))


def within(index: Index, view: Layout, of: Layout) -> Index:
    """The index, in one tensor, of entries of another one in the same memory; the first fills it without gaps."""
    if view == of:
        return index
    shape, strides, begin = of
    dims = sorted((d for d, size in enumerate(shape) if size > 1), key=lambda d: -strides[d])
    start, rest = [0] * len(shape), view[2] - begin
    for d in dims:
        start[d], rest = divmod(rest, strides[d])
    found = [torch.zeros((), dtype=torch.long)] * len(shape)
    axes = {stride: a for a, (size, stride) in enumerate(zip(*view[:2], strict=True)) if size > 1}
    sizes = [view[0][axes[strides[d]]] if strides[d] in axes else 1 for d in dims]
    if math.prod(sizes) == math.prod(view[0]) and all(
        start[d] + n <= shape[d] for d, n in zip(dims, sizes, strict=True)
    ):
        # Each axis runs along a dimension.
        for d in dims:
            found[d] = torch.tensor(start[d]) + (index[axes[strides[d]]] if strides[d] in axes else 0)
        return tuple(found)
    offset = sum((i * stride for i, stride in zip(index, view[1], strict=True)), torch.tensor(view[2] - begin))
    for d in dims:
        found[d], offset = offset // strides[d], offset % strides[d]
    return tuple(found)


def _reshaped(shape: Sequence[int], index: Index, input: Tensor, *args: Any, **kwargs: Any) -> Sources:
    old, same = tuple(input.shape), 0
    while same < min(len(old), len(shape)) and old[-1 - same] == shape[-1 - same]:
        same += 1
    head = ravel(index[: len(shape) - same], shape[: len(shape) - same])
    yield input, None, (*unravel(head, old[: len(old) - same]), *index[len(shape) - same :])


def _joined(shape: Sequence[int], index: Index, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Sources:
    dim, begin = kwargs.get("axis", dim) % len(shape), 0
    for t in tensors:
        if t.ndim == len(shape) and t.shape[dim]:
            own, end = index[dim] - begin, begin + t.shape[dim]
            where = (index[dim] >= begin) & (index[dim] < end)
            yield t, where, (*index[:dim], own.clamp(0, t.shape[dim] - 1), *index[dim + 1 :])
            begin = end


def _stacked(shape: Sequence[int], index: Index, tensors: Sequence[Tensor], dim: int = 0, **kwargs: Any) -> Sources:
    dim %= len(shape)
    for i, t in enumerate(tensors):
        yield t, index[dim] == i, (*index[:dim], *index[dim + 1 :])


def _below(shape: Sequence[int], index: Index, tensors: Sequence[Tensor], **kwargs: Any) -> Sources:
    return _joined(shape, index, [torch.atleast_2d(t) for t in tensors])


def _beside(shape: Sequence[int], index: Index, tensors: Sequence[Tensor], **kwargs: Any) -> Sources:
    return _joined(shape, index, tensors, min(1, len(shape) - 1))


def _repeated(shape: Sequence[int], index: Index, input: Tensor, *args: Any, **kwargs: Any) -> Sources:
    own = index[len(shape) - input.ndim :]
    yield input, None, tuple(i % size for i, size in zip(own, input.shape, strict=True))


def _interleaved(
    shape: Sequence[int], index: Index, input: Tensor, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Sources:
    d = 0 if dim is None else dim % input.ndim
    if isinstance(repeats, Tensor) and repeats.numel() > 1:
        along = torch.searchsorted(repeats.cpu().cumsum(0), index[d].contiguous(), right=True)
    else:
        along = index[d] // int(repeats)
    yield input, None, unravel(along, input.shape) if dim is None else (*index[:d], along, *index[d + 1 :])


def _flipped(shape: Sequence[int], index: Index, input: Tensor, *args: Any, **kwargs: Any) -> Sources:
    (dims,) = kwargs.values() if kwargs else args if isinstance(args[0], (tuple, list)) else (args,)
    turned = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims)}
    yield input, None, tuple(shape[d] - 1 - i if d in turned else i for d, i in enumerate(index))


def _rolled(shape: Sequence[int], index: Index, input: Tensor, shifts: Any, dims: Any = None, **kwargs: Any) -> Sources:
    if dims is None or dims == ():
        shift = shifts if isinstance(shifts, int) else shifts[0]
        yield input, None, unravel((ravel(index, shape) - shift) % math.prod(shape), shape)
        return
    pairs = zip([shifts] if isinstance(shifts, int) else shifts, [dims] if isinstance(dims, int) else dims, strict=True)
    own = list(index)
    for shift, d in pairs:
        own[d] = (own[d] - shift) % shape[d]
    yield input, None, tuple(own)


SOURCES: dict[Callable[..., Any], Callable[..., Sources]] = {
    torch.cat: _joined, torch.concat: _joined, torch.concatenate: _joined, torch.stack: _stacked,
    torch.vstack: _below, torch.hstack: _beside,
    torch.reshape: _reshaped, Tensor.reshape: _reshaped, torch.flatten: _reshaped, Tensor.flatten: _reshaped,
    Tensor.repeat: _repeated, torch.tile: _repeated, Tensor.tile: _repeated,
    torch.repeat_interleave: _interleaved, Tensor.repeat_interleave: _interleaved,
    torch.flip: _flipped, Tensor.flip: _flipped, torch.roll: _rolled, Tensor.roll: _rolled,
}  # fmt: skip
"""For each function, ``(result's shape, index in the result, *arguments)`` to the entries of its operands.

What is picked by indices is a table of positions, as a rule.
"""
