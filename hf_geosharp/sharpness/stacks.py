"""Pairs of one shape, stacked: where each lies in the parameters, and how they are read and written at once."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_geosharp.symmetry.health import by_head
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.views import Window, read, shape_of, windows

_LARGEST = 1 << 20
"""Entries of a stack, if it has several."""


@dataclass(frozen=True)
class Stack:
    """Pairs of one shape, stacked, and where each one's copies begin."""

    pairs: tuple[Pair, ...]
    starts: tuple[int, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters that the pairs are views of."""
        return tuple(dict.fromkeys(n for p in self.pairs for n in p.parameters))

    def name_of(self, copy: int) -> str:
        """The pair that a copy belongs to, and its head (of which it may be one of several parts)."""
        i = bisect_right(self.starts, copy) - 1
        pair = self.pairs[i]
        if pair.copies == 1:
            return pair.name
        heads = by_head(pair, torch.arange(pair.copies))
        return f"{pair.name} head {int((heads == copy - self.starts[i]).any(1).nonzero())}"

    def read(self, tensors: Mapping[str, Tensor], outs: Sequence[Tensor]) -> None:
        """Gathers both factors of all pairs into ``outs`` (copies, d, rows)."""
        for pair, start in zip(self.pairs, self.starts, strict=True):
            for views, out in zip((pair.g, pair.h), outs, strict=True):
                read(views, tensors, out[start : start + pair.copies])

    def bind(self, tensors: Mapping[str, Tensor], shapes: Sequence[tuple[int, ...]], complex_: bool) -> Bound:
        """Works out where each view lies in the tensors, and in both factors of these shapes."""
        links = []
        for factor, shape in enumerate(shapes):
            like = torch.empty(shape, dtype=torch.complex64 if complex_ else torch.float32, device="meta")
            for pair, start in zip(self.pairs, self.starts, strict=True):
                views = pair.h if factor else pair.g
                for view, (there, here) in zip(
                    views, windows(views, tensors, like[start : start + pair.copies]), strict=True
                ):
                    begin = start * like.stride(0) * (2 if complex_ else 1)
                    here = replace(here, offset=here.offset + begin)
                    links.append(_Link(view.parameter, factor, tensors[view.parameter], there, here, view.shift))
        return Bound(tuple(links))


@dataclass(frozen=True)
class _Link:
    """Where one view lies in its parameter and in a factor of its stack."""

    parameter: str
    factor: int
    tensor: Tensor
    there: Window
    here: Window
    shift: float


@dataclass(frozen=True)
class Bound:
    """The views of a stack on the parameters of one model, worked out once: a step opens each many times."""

    links: tuple[_Link, ...]

    def read(self, tensors: Mapping[str, Tensor], outs: Sequence[Tensor]) -> None:
        """Gathers both factors into ``outs`` (copies, d, rows) from tensors shaped like the parameters."""
        flat = [_real(x) for x in outs]
        sources = []
        for link in self.links:
            tensor = tensors[link.parameter]
            if not link.there.fits(tensor):
                tensor = torch.empty_like(link.tensor).copy_(tensor)
            sources.append(link.there.of(tensor))
        torch._foreach_copy_([link.here.of(flat[link.factor]) for link in self.links], sources)

    def write(self, sources: Sequence[Tensor]) -> None:
        """Scatters both factors, contiguous as (copies, d, rows), into the parameters."""
        flat = [_real(x.resolve_conj()) for x in sources]
        targets = [link.there.of(link.tensor) for link in self.links]
        torch._foreach_copy_(targets, [link.here.of(flat[link.factor]) for link in self.links])
        for link, target in zip(self.links, targets, strict=True):
            if link.shift:
                target -= link.shift


def _real(x: Tensor) -> Tensor:
    return torch.view_as_real(x) if x.is_complex() else x


def stacked(pairs: Sequence[Pair], place: Callable[[Pair], torch.device | None] = lambda _: None) -> list[Stack]:
    """Pairs of one kind, group, shape and device together, up to a size: what is not kept comes a stack at a time."""
    groups: dict[tuple[object, ...], list[Pair]] = {}
    for pair in pairs:
        key = (pair.kind, pair.group, shape_of(pair.g)[1:], shape_of(pair.h)[1:], place(pair))
        groups.setdefault(key, []).append(pair)
    out = []
    for members in (some for alike in groups.values() for some in _up_to(_LARGEST, alike)):
        starts = [0]
        for pair in members:
            starts.append(starts[-1] + pair.copies)
        out.append(Stack(tuple(members), tuple(starts[:-1])))
    return out


def _up_to(size: int, pairs: Sequence[Pair]) -> Iterator[Sequence[Pair]]:
    """As many pairs at a time as have so many entries together, or one."""
    each = max(sum(math.prod(shape_of(views)) for views in (pair.g, pair.h)) for pair in pairs)
    count = max(1, size // each)
    return (pairs[i : i + count] for i in range(0, len(pairs), count))


def device_of(tensor: Tensor) -> torch.device:
    """Where a tensor lies: parts are made of what lies together."""
    return tensor.device
