"""Twins with fewer heads, of code that works out the size of a head from the width of what it reads.

``C // n_head`` is as it was only where heads and stream grow shorter together: a few of the heads are kept, and of
everything that counts them the same share, dimensions of parameters and of arguments and numbers kept beside them. How
the heads lie among the features, one after the other or in sections, the code knows itself; views follow it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor, nn

from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.pairs import Between
from hf_geosharp.symmetry.tracing.recorded import mapped
from hf_geosharp.symmetry.trials.narrow import Cut, last_axis_cut, replace_numbers
from hf_geosharp.symmetry.views import Axis, View

KEPT = 2
"""Heads that are left: with one alone nothing could be told of which of them meet."""


@dataclass(frozen=True)
class FewerHeads(Cut):
    """Of ``heads`` heads the first :data:`KEPT`, and of what counts them the same share.

    Attributes:
        heads: how many there are: of keys and values, where several queries share one.
        numbers: lengths and numbers that follow -> what is left of them.
    """

    heads: int
    dimensions: Mapping[str, frozenset[int]]
    numbers: Mapping[int, int]

    def length(self, before: int) -> int:
        """The share of a length or a step."""
        return before // self.heads * KEPT

    def tell(self, module: nn.Module, twin: nn.Module, names: Mapping[int, str]) -> None:
        """Tells every part, for how many heads there are need not stand where parameters are; statistics follow too."""
        for copied in twin.modules():
            replace_numbers(copied, self.numbers)
            for name, buffer in copied._buffers.items():
                if buffer is not None and buffer.ndim == 1 and buffer.is_floating_point():
                    copied._buffers[name] = buffer[: self.numbers.get(len(buffer))]

    def shortened(self, x: Any, own: Mapping[str, tuple[int, ...]]) -> Any:
        """Tensors are cut along a last axis that follows; masks (..., heads, queries, keys) along that of heads."""

        def fewer(v: Any) -> Any:
            if not isinstance(v, Tensor) or v.ndim < 3 or v.shape[-1] in self.numbers or v.shape[-3] % self.heads:
                return v
            if v.ndim > 3:
                return v.narrow(-3, 0, KEPT) if v.shape[-3] == self.heads else v
            # Samples and heads together, as torch's own attention takes them.
            return v.unflatten(0, (-1, self.heads))[:, :KEPT].flatten(0, 1)

        return last_axis_cut(mapped(x, fewer), self.numbers)

    def between(self, between: Between) -> Between | None:
        """The same: it acts on each of what is left."""
        return between

    def view(self, view: View) -> View | None:
        """The view of the heads that are left, or of the rows."""
        axes, start = list(view.axes), list(view.start)
        for d in self.of(view.parameter):
            own = [a for a in view.axes if a.dimension == d and a.size > 1]
            outer = _outer(view, d)
            if outer is None:
                if len(own) != 1 or own[0].name not in view.rows or own[0].size not in self.numbers or start[d]:
                    return None
                axes[axes.index(own[0])] = replace(own[0], size=self.length(own[0].size))
                continue
            section, first = divmod(start[d], outer.size * outer.step)
            larger = [a for a in own if a.step > outer.step]
            if outer.size != self.heads or first >= outer.step or any(a.step % self.heads for a in larger):
                return None
            start[d] = section * KEPT * outer.step + first
            axes[axes.index(outer)] = replace(outer, size=KEPT)
            for a in larger:
                axes[axes.index(a)] = replace(a, step=self.length(a.step))
        return replace(view, axes=tuple(axes), start=tuple(start))


def fewer_heads(symmetry: Symmetry, own: Mapping[str, tuple[int, ...]]) -> FewerHeads | None:
    """How a module is cut to a few of the heads that a symmetry acts on; None where it does not say which those are.

    ``own`` gives the names and shapes of the module's parameters.
    """
    heads, widest = set(), 1
    numbers: dict[int, int] = {}
    for view in _views(symmetry):
        for d in range(len(view.start)):
            outer = _outer(view, d)
            if outer is None:
                continue
            heads.add(outer.size)
            rows = math.prod(a.size for a in view.axes if a.dimension == d and a.name in view.rows)
            features = math.prod(a.size for a in view.axes if a.dimension == d)
            widest = max(widest, features // (outer.size * rows))
            # Where parts are fused, how much of the features is theirs stands in no shape.
            numbers |= {outer.size * n: KEPT * n for n in (1, rows, outer.step)}
    if len(heads) != 1:
        return None
    (count,) = heads
    # Coordinates are no heads: of a norm over two of them nothing but a sign would be left. Where heads have as many
    # coordinates as there are heads, a number may count either.
    if count <= KEPT or widest <= 2 or count == widest:
        return None
    # What is no longer than a head may be one of its coordinates.
    lengths = {n for shape in own.values() for n in shape if n % count == 0 and n > widest}
    numbers |= {n: n // count * KEPT for n in lengths}
    dimensions = {
        name: frozenset(d for d, n in enumerate(shape) if n in lengths or n == count) for name, shape in own.items()
    }
    return FewerHeads(count, {name: which for name, which in dimensions.items() if which}, numbers)


def _views(symmetry: Symmetry) -> Iterator[View]:
    for field in fields(symmetry):  # type: ignore[arg-type]
        value = getattr(symmetry, field.name)
        yield from (v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, View))


def _outer(view: View, dimension: int) -> Axis | None:
    """The axis of a dimension that counts heads: of those that count copies the one that moves farthest."""
    own = (a for a in view.axes if a.dimension == dimension and a.size > 1 and a.name in view.copies)
    return max(own, key=lambda a: a.step, default=None)
