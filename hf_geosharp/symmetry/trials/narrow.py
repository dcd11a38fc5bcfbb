"""Narrow twins: what a trial costs must not grow with the width of the model.

A symmetry acts on heads and hidden units. How long the rows are that it acts on, the width of the stream that a module
reads and writes, is nothing to it: the same code is tried on rows cut short, the shorter the more heads and units there
are. Which dimensions are the stream's is read off the trace: the inputs of linear maps that read nothing made inside
the module, the outputs that nothing inside it reads, and what is added to them on the way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Between
from hf_geosharp.symmetry.tracing.recorded import mapped
from hf_geosharp.symmetry.views import View

if TYPE_CHECKING:
    from hf_geosharp.symmetry.tracing.events import Linear, Trace
    from hf_geosharp.symmetry.tracing.weights import Slab

WIDTH = 256
"""Streams that are wider are always cut, to this or to less."""

BUDGET = 1 << 18
"""While a twin has more entries, what is left of its streams is halved ..."""

FLOOR = 16
"""... down to this.

Heads may have more coordinates: what a claim needs is no full rank, which the few tokens of an example do not give it
either.
"""


class Cut(ABC):
    """How a twin of a module is cut."""

    dimensions: Mapping[str, frozenset[int]]
    """Names of parameters -> which of their dimensions are cut; none where the twin is a whole one."""

    def __bool__(self) -> bool:
        """Whether anything is cut."""
        return bool(self.dimensions)

    def of(self, name: str) -> frozenset[int]:
        """Which dimensions of a parameter are cut."""
        return self.dimensions.get(name, frozenset())

    def cut(self, name: str, parameter: Tensor) -> Tensor:
        """What is left of a parameter; a view."""
        for d in self.of(name):
            parameter = parameter.narrow(d, 0, self.length(parameter.shape[d]))
        return parameter

    def left(self, name: str, shape: Sequence[int]) -> int:
        """How many entries are left of a parameter."""
        own = self.of(name)
        return math.prod(self.length(n) if d in own else n for d, n in enumerate(shape))

    @abstractmethod
    def length(self, before: int) -> int:
        """What is left of a dimension that is cut."""

    @abstractmethod
    def tell(self, module: nn.Module, twin: nn.Module, names: Mapping[int, str]) -> None:
        """Tells the parts of a twin what is left: numbers that they keep; ``names`` are the parameters' by identity."""

    @abstractmethod
    def shortened(self, x: Any, own: Mapping[str, tuple[int, ...]]) -> Any:
        """Arguments of the module as the twin takes them; ``own`` gives the shapes of the parameters."""

    @abstractmethod
    def between(self, between: Between) -> Between | None:
        """What stands between the factors of a pair of cut parameters; None where it acts along what is cut."""

    @abstractmethod
    def view(self, view: View) -> View | None:
        """The view of a cut parameter; None where what it covers is not left as a whole."""


@dataclass(frozen=True)
class Cuts(Cut):
    """Streams cut to a width.

    Attributes:
        width: what is left.
        told: whether numbers that are kept beside a parameter follow; heads together may be as wide as the stream.
    """

    width: int
    dimensions: Mapping[str, frozenset[int]]
    told: bool = True

    def length(self, before: int) -> int:
        """The width."""
        return self.width

    def tell(self, module: nn.Module, twin: nn.Module, names: Mapping[int, str]) -> None:
        """Tells the parts that own what was cut how wide it is now."""
        for part, copied in zip(module.modules(), twin.modules(), strict=True) if self.told else ():
            own = [(p, self.of(names.get(id(p), ""))) for p in part._parameters.values() if p is not None]
            # A number may be that of matrices in one parameter, of experts say, which is as it was.
            kept = {len(p) for p, cut in own if p.ndim > 2 and 0 not in cut}
            numbers = {p.shape[d] for p, cut in own for d in cut} - kept
            replace_numbers(copied, dict.fromkeys(numbers, self.width))

    def shortened(self, x: Any, own: Mapping[str, tuple[int, ...]]) -> Any:
        """Floating-point tensors are cut along a last axis that is as wide as a stream."""
        return last_axis_cut(
            x, {own[name][d]: self.width for name, dimensions in self.dimensions.items() for d in dimensions}
        )

    def between(self, between: Between) -> Between | None:
        """The same where none of it is cut."""
        b = between
        return None if b.axis in self.of(b.parameter) or self.of(b.gain) or self.of(b.bias) else b

    def view(self, view: View) -> View | None:
        """The view with rows cut short."""
        axes = []
        for axis in view.axes:
            if axis.dimension in self.of(view.parameter) and axis.size > 1:
                alone = sum(a.dimension == axis.dimension and a.size > 1 for a in view.axes) == 1
                if not alone or axis.name not in view.rows or axis.step != 1 or view.start[axis.dimension]:
                    return None
                axis = replace(axis, size=self.width)
            axes.append(axis)
        return replace(view, axes=tuple(axes))


WHOLE = Cuts(0, {})
"""Nothing is cut."""


def cuts(trace: Trace, scope: str, own: Mapping[str, tuple[int, ...]]) -> tuple[Cuts, ...]:
    """How twins of a module may be cut; ``own`` gives the names and shapes of its parameters.

    To be tried in this order: code may not run on so little (a norm of 32 groups, say), but on more.
    """
    stream = _stream(trace, scope, own)
    width = WIDTH
    while width > FLOOR and sum(_at(width, stream, own).left(n, shape) for n, shape in own.items()) > BUDGET:
        width //= 2
    return tuple(c for c in (_at(w, stream, own) for w in dict.fromkeys((width, WIDTH))) if c)


def _at(width: int, stream: Mapping[str, frozenset[int]], own: Mapping[str, tuple[int, ...]]) -> Cuts:
    """Those streams cut that are wider."""
    wide = {name: frozenset(d for d in dimensions if own[name][d] > width) for name, dimensions in stream.items()}
    return Cuts(width, {name: dimensions for name, dimensions in wide.items() if dimensions})


def _stream(trace: Trace, scope: str, own: Mapping[str, tuple[int, ...]]) -> dict[str, frozenset[int]]:
    """Which dimensions of a module's parameters are those of a stream."""
    inside = [x for x in trace.linears if scope in x.scope]
    reads, writes = _streams(trace, scope, inside)
    votes: dict[tuple[str, int], bool] = {}

    def vote(slab: Slab, dimensions: tuple[int, ...], size: int, stream: bool) -> None:
        whole = len(dimensions) == 1 and slab.shape[dimensions[0]] == size
        for d in dimensions:
            key = slab.parameter, d
            votes[key] = votes.get(key, True) and stream and whole

    for x in inside:
        vote(x.weight, x.weight.inner, x.inputs, id(x.leaf) in reads)
        vote(x.weight, x.weight.out, x.outputs, id(x.leaf) in writes)
        if x.bias is not None:
            vote(x.bias, (0,), x.outputs, id(x.leaf) in writes)
    found: dict[str, set[int]] = {}
    for (name, dimension), stream in votes.items():
        if stream and name in own:
            found.setdefault(name, set()).add(dimension)
    widths = {own[name][d] for name, dimensions in found.items() for d in dimensions}
    used = {name for name, _ in votes}
    made = {id(x.leaf) for x in inside} | {id(s.leaf) for s in trace.softmaxes if scope in s.scope}
    for before, *weights in trace.before_norm.values():
        if {id(s) for s in trace.sources(before)} & (made - writes):
            used.update(weights)  # it normalises heads, or what they return
    for name, shape in own.items():
        # The weights of a norm of the stream.
        if name not in used and len(shape) == 1 and shape[0] in widths:
            found[name] = {0}
    return {name: frozenset(dimensions) for name, dimensions in found.items()}


def _streams(trace: Trace, scope: str, inside: Sequence[Linear]) -> tuple[set[int], set[int]]:
    """Identities of the leaves of linear maps that read the stream, and of those that write it."""
    behind = {id(x.leaf): {id(s) for s in trace.sources(x.source)} for x in inside}
    softmaxes = {id(s.leaf) for s in trace.softmaxes if scope in s.scope}
    compared = {id(y) for s in trace.softmaxes if scope in s.scope for y in trace.sources(s.logits)}
    made = behind.keys() | softmaxes
    read = compared.union(*behind.values())
    # Beyond doubt: what comes from outside, and what goes there; between them what is added to it.
    widths = {x.inputs for x in inside if not behind[id(x.leaf)] & made}
    # (What nothing feels goes nowhere: it scores keys, the best of which are picked.)
    widths |= {x.outputs for x in inside if id(x.leaf) in trace.felt - read}
    reads = {id(x.leaf) for x in inside if x.inputs in widths and not behind[id(x.leaf)] & softmaxes}
    reads = {x for x in reads if not behind[x] or behind[x] - made}
    writes = {id(x.leaf) for x in inside if x.outputs in widths and id(x.leaf) in trace.felt - compared}
    while True:
        fewer_reads = {x for x in reads if behind[x] & made <= writes}
        fewer_writes = {x for x in writes if all(y in fewer_reads for y, sources in behind.items() if x in sources)}
        if (fewer_reads, fewer_writes) == (reads, writes):
            return reads, writes
        reads, writes = fewer_reads, fewer_writes


def narrowed(symmetry: Symmetry, chosen: Cut) -> Symmetry | None:
    """The symmetry of cut parameters; None where it acts along what is cut, or is not made of views alone."""
    changes: dict[str, Any] = {}
    for field in fields(symmetry):  # type: ignore[arg-type]
        value = getattr(symmetry, field.name)
        if value is None or isinstance(value, (str, int, Group)) or value == ():
            continue
        parts = value if isinstance(value, tuple) else (value,)
        made = [_part(x, chosen) for x in parts]
        if None in made:
            return None
        changes[field.name] = tuple(made) if isinstance(value, tuple) else made[0]
    return replace(symmetry, **changes)  # type: ignore[type-var]


def _part(x: Any, chosen: Cut) -> View | Between | Symmetry | None:
    if isinstance(x, Symmetry):
        return narrowed(x, chosen)
    if isinstance(x, Between):
        return chosen.between(x)
    return chosen.view(x) if isinstance(x, View) else None


def replace_numbers(part: nn.Module, instead: Mapping[int, int]) -> None:
    """Replaces numbers that a part of a module keeps, alone or in a tuple."""

    def new(v: Any) -> Any:
        return instead.get(v, v) if isinstance(v, int) and not isinstance(v, bool) else v

    for name, value in list(vars(part).items()):
        if not name.startswith("_") and isinstance(value, (int, tuple)):
            other = tuple(map(new, value)) if isinstance(value, tuple) else new(value)
            if other != value:
                setattr(part, name, other)


def last_axis_cut(x: Any, left: Mapping[int, int]) -> Any:
    """Arguments whose floating-point tensors are cut along a last axis of one of these lengths."""

    def short(v: Any) -> Any:
        cut = isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1 and v.shape[-1] in left
        return v[..., : left[v.shape[-1]]] if cut else v

    return mapped(x, short)


Plan = Callable[[str, Mapping[str, tuple[int, ...]]], Sequence[Cuts]]
"""(module, shapes of its parameters by their names in the model) -> how twins of it may be cut, in order."""
