"""Constants that one parameter or another may hold: biases and tables that are added to one stream.

The bias of a norm whose output is the residual, as in BERT, can go into the biases of what reads it and into the next
bias that is added; of two biases that are added to one stream before anything reads it one can take up the other; and
so for tables of words and positions, for tokens and convolutions. The derivatives of all that becomes of them are
alike then, up to one number that both are multiplied by, whatever the parameters are that they meet on the way.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Mean, Reader, StreamBias, whole
from hf_geosharp.symmetry.folding.readers import across, by_norm, owned, reader_of, shiftable
from hf_geosharp.symmetry.folding.unseen import End, always, derivatives, ends_of, leaves_behind, noise, rounds
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.features import NEAR
from hf_geosharp.symmetry.tracing.graph import NoDerivativeError, gradients
from hf_geosharp.symmetry.views import View

SEEDS, MOST_SUMS = 8, 16
"""The first seed of random sums, what is alike by chance not being so twice; how many are made at most."""


@dataclass(eq=False)
class _Constant:
    """Something that is added: a vector, or the same to all rows of a table or of several vectors.

    Attributes:
        view: the parameter as (coordinates, rows).
        tensors: what has its derivatives, each with the axis that counts the coordinates.
        indices: of a table, which of its rows the tensors are.
        readers, uses: linear maps that read the norm whose bias it is, and each use of one.
    """

    view: View
    tensors: Sequence[tuple[Tensor, int]]
    indices: Sequence[Tensor] = ()
    readers: tuple[Reader, ...] = ()
    uses: Sequence[Linear] = ()

    @property
    def rows(self) -> int:
        """How many rows there are that can be told apart; 0 where some of a table were not looked up, or too many."""
        count = self.view.height
        if len(self.view.rows) != 1 or not 1 < count <= MOST_ROWS:
            return 0
        if self.indices and len(torch.cat([x.flatten() for x in self.indices]).unique()) < count:
            return 0
        return count

    def derivatives(self, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Along a shift of each coordinate, (rows, coordinates): one row for all if they are not told apart."""
        parts = [
            None if g is None else g.movedim(axis, -1).reshape(-1, x.shape[axis])
            for (x, axis), g in zip(self.tensors, grads, strict=True)
        ]
        if all(p is None for p in parts):
            return None
        if not self.rows:
            return torch.stack([p.sum(0) for p in parts if p is not None]).sum(0, keepdim=True)
        if not self.indices:
            return next(p for p in parts if p is not None)
        made = torch.zeros(self.rows, self.view.width).to(next(p for p in parts if p is not None))
        for where, p in zip(self.indices, parts, strict=True):
            if p is not None:
                made = made.index_add(0, where.flatten(), p)
        return made


MOST_ROWS = 2048
"""Of tables with more rows no part is tried: that is a system of equations with so many unknowns."""


@dataclass(frozen=True)
class _Alike:
    """Which constant another one can hold, where in that, and what it is multiplied by there."""

    bias: int
    into: int
    rows: range | None
    """Some rows of the other one, next to each other; None for all."""
    ratio: float


def stream_biases(
    model: nn.Module, names: Mapping[int, str], trace: Trace, taken: frozenset[str], means: Sequence[Mean]
) -> Iterator[StreamBias]:  # fmt: skip
    """The folds, without names, of constants that others can hold, in the order in which they have to be done.

    ``names`` are those of the model's parameters, by identity; what is ``taken`` folds already; ``means`` are those
    that nothing sees of what is written.
    """
    constants = list(_constants(model, names, trace, taken))
    ends = ends_of(trace)
    try:
        found = list(_alike(constants, _Sums(ends, constants)))
        if found and not rounds(ends):
            exact = _along(ends, constants, SEEDS + MOST_SUMS, graph=True)
            leaves = leaves_behind(trace, ends)
            rows = [_difference(exact, f) for f in found]
            if not always(rows, leaves):
                found = [f for f, r in zip(found, rows, strict=True) if always([r], leaves)]
    except NoDerivativeError:
        return
    free = [v for mean in means for v in mean.views]
    for f in found:
        bias, into = constants[f.bias], constants[f.into]
        # A number that is added to all coordinates of either is among the means already.
        twice = not bias.readers and all(any(v.meets(w) for w in free) for v in (bias.view, into.view))
        module = bias.view.parameter.rpartition(".")[0]
        view = into.view if f.rows is None else _part(into.view, f.rows)
        yield StreamBias("", module, bias.view, view, f.ratio, bias.readers, int(twice))


def _constants(model: nn.Module, names: Mapping[int, str], trace: Trace, taken: frozenset[str]) -> Iterator[_Constant]:
    """All that is added: biases that readers take up, then smaller parameters before those that can hold them."""
    every = owned(model, names)
    mine, alone = every - taken, every - trace.looked_up
    found: list[_Constant] = []
    biases: dict[str, list[Linear]] = {}
    for x in trace.linears:
        if x.bias is not None:
            biases.setdefault(x.bias.parameter, []).append(x)
    for name, events in biases.items():
        whole_of_it = all(
            x.exact and x.bias is not None and x.bias.shape == (x.outputs,) and not x.grouped for x in events
        )
        if name in alone - taken and whole_of_it:
            tensors = [(x.leaf, x.axis) for x in events]
            found.append(_Constant(_vector(name, events[0].outputs), tensors))
    readers = _readers(trace, alone)
    norms = {bias: path for path, (_, _, bias) in trace.before_norm.items() if bias}
    multiplied = {gain for _, gain, _ in trace.before_norm.values()}
    cut = {x.weight.parameter for x in trace.linears}
    for name in names.values():
        if name not in mine or name in biases or name in cut or name in multiplied:
            continue
        parameter = model.get_parameter(name)
        if not parameter.is_floating_point():
            continue
        if name in trace.looked_up:
            if name in trace.lookups and parameter.ndim == 2:
                rows, indices = zip(*trace.lookups[name], strict=True)
                found.append(_Constant(_table(name, parameter.shape), [(x, -1) for x in rows], indices))
        elif parameter.ndim > 1 and sum(n > 1 for n in parameter.shape[:-1]) <= 1:
            found.append(_Constant(_table(name, parameter.shape), [(parameter, -1)]))
        elif parameter.ndim == 1:
            constant = _Constant(_vector(name, len(parameter)), [(parameter, 0)])
            path = norms.get(name)
            if path is not None:
                if path in trace.scaled:
                    continue
                # Not what reads it head by head.
                own = [(r, some) for r, some in readers.get(path, []) if some[0].inputs == len(parameter)]
                constant = replace(
                    constant, readers=tuple(r for r, _ in own), uses=[x for _, some in own for x in some]
                )
            found.append(constant)
    # First the biases of norms that readers take up: they hold no others.
    yield from sorted(found, key=lambda c: (not c.readers, model.get_parameter(c.view.parameter).numel()))


def _readers(trace: Trace, alone: set[str]) -> dict[str, list[tuple[Reader, list[Linear]]]]:
    """Linear maps that can take up the bias of the norm that they read, by the norm, with their uses."""
    found: dict[str, list[tuple[Reader, list[Linear]]]] = {}
    for events in trace.uses.values():
        for norm, mine, alone_there in by_norm(trace, events):
            if norm is None or not alone_there or any(across(trace, x) or not x.exact for x in mine):
                continue
            reader = reader_of(mine, alone, mine[0].inputs)
            if reader is None:
                continue
            reader = replace(reader, shiftable=not reader.bias and shiftable(mine, trace))
            if reader.bias or reader.shiftable:
                found.setdefault(norm, []).append((reader, mine))
    return found


def _vector(name: str, size: int) -> View:
    view = whole(name, size)
    return View(name, view.axes, view.start, (), tuple(view.names), ())


def _table(name: str, shape: Sequence[int]) -> View:
    """A parameter whose last axis counts the coordinates; as a vector if it has one row."""
    view = whole(name, *shape)
    *others, own = view.names
    rows = tuple(n for n, size in zip(others, shape, strict=False) if size > 1)
    axes = tuple(a for a in view.axes if a.name in (*rows, own))
    return View(name, axes, view.start, (), (own,), rows)


def _part(view: View, rows: range) -> View:
    """Some rows of a table, next to each other."""
    (name,) = view.rows
    axis = next(a for a in view.axes if a.name == name)
    start = tuple(s + rows.start * axis.step * (d == axis.dimension) for d, s in enumerate(view.start))
    if len(rows) == 1:
        return replace(view, axes=tuple(a for a in view.axes if a is not axis), start=start, rows=())
    axes = tuple(replace(a, size=len(rows)) if a is axis else a for a in view.axes)
    return replace(view, axes=axes, start=start)


def _along(ends: Sequence[End], constants: Sequence[_Constant], seed: int, graph: bool = False) -> list[Tensor | None]:
    """The derivatives of one random sum of all ends along each constant, but for what its own readers take up."""
    grads = iter(derivatives(ends, [x for c in constants for x, _ in c.tensors], seed, graph))
    along = [c.derivatives([next(grads) for _ in c.tensors]) for c in constants]
    read = {id(e.linear): (e.tensor, own) for e, own in zip(ends, noise(ends, seed), strict=True) if e.linear}
    for k, c in enumerate(constants):
        sources = [read[id(x)] for x in c.uses if id(x) in read]
        whole_of_it = along[k]
        if sources and whole_of_it is not None:
            (own,) = gradients([x for x, _ in sources], [c.tensors[0][0]], [n for _, n in sources], graph=graph)
            along[k] = whole_of_it if own is None else whole_of_it - own
    return along


_NEAR = {torch.float64: 1e-5, torch.float32: 1e-4}
"""Relative difference of derivatives that are alike: what a block makes of its input may be little beside that.

Models that compute in double precision have parts that do so in single.
"""


class _Sums:
    """Derivatives of random sums along all constants, made as they are asked for; ``near`` is how precise they are."""

    def __init__(self, ends: Sequence[End], constants: Sequence[_Constant]) -> None:
        self._ends, self._constants = ends, constants
        self.near = max((_NEAR.get(e.tensor.dtype, NEAR) for e in ends), default=NEAR)
        self._made: list[list[Tensor | None]] = []
        self._bases: dict[int, Tensor] = {}

    def of(self, place: int, count: int = 2) -> Tensor | None:
        """Of one constant, (rows, coordinates of all sums); None where there is nothing."""
        while len(self._made) < count:
            made = _along(self._ends, self._constants, SEEDS + len(self._made))
            self._made.append([None if g is None else g.detach().double() for g in made])
        some = [own for made in self._made[:count] if (own := made[place]) is not None]
        return torch.cat(some, 1) if len(some) == count and all(bool(x.any()) for x in some) else None

    def span(self, place: int, rows: Tensor, a: Tensor) -> bool:
        """Whether a vector is made of the rows of one constant; what that takes is worked out once for all vectors."""
        if place not in self._bases:
            self._bases[place] = torch.linalg.qr(rows.T).Q
        basis = self._bases[place]
        return bool((a - basis @ (basis.T @ a)).norm() <= self.near * a.norm())


def _alike(constants: Sequence[_Constant], sums: _Sums) -> Iterator[_Alike]:
    """Which constants another one can hold."""
    along = {i: own.sum(0) for i in range(len(constants)) if (own := sums.of(i)) is not None}
    places = {width: [i for i in along if len(along[i]) == width] for width in {len(v) for v in along.values()}}
    for i in along:
        others = [j for j in places[len(along[i])] if j > i and _may_hold(constants[j], constants[i])]
        whole_of = ((j, None) for j in _parallel(along, i, others))
        for j, rows in (*whole_of, *((j, _part_of(sums, constants, i, j)) for j in others if constants[j].rows)):
            ratio = _ratio(sums, i, j, rows)
            if ratio:
                yield _Alike(i, j, rows, _exact(ratio))
                break


def _exact(ratio: float) -> float:
    """The root of an integer, or its inverse, where it is that but for rounding: what models multiply by."""
    for sign in (1, -1):
        square = abs(ratio) ** (2 * sign)
        nearest = round(square)
        # Every large number is near an integer.
        if nearest >= 1 and abs(square / nearest - 1) < (ROUNDED if nearest <= FEW else EXACT):
            return math.copysign(nearest ** (sign / 2), ratio)
    return ratio


ROUNDED, EXACT, FEW = 1e-5, 1e-11, 32
"""Relative error of a number that is worked out in single precision, and in double; what is no large integer."""


def _may_hold(into: _Constant, bias: _Constant) -> bool:
    """Not what reads the same norm, or a norm's bias that is read: the readers would see what is added."""
    return not into.readers and not any(r.bias == into.view.parameter for r in bias.readers)


def _parallel(along: Mapping[int, Tensor], i: int, others: Sequence[int]) -> list[int]:
    """Those that are a multiple of one, about: at once, for there are many."""
    if not others:
        return []
    rows = torch.stack([along[j] for j in others])
    cosines = (rows @ along[i]) / (rows.norm(dim=1) * along[i].norm())
    return [j for j, c in zip(others, cosines.abs().tolist(), strict=True) if c > 1 - NEAR]


MARGIN = 8
"""How many more numbers there are than rows of which some may hold a constant."""


def _part_of(sums: _Sums, constants: Sequence[_Constant], i: int, j: int) -> range | None:
    """The rows of one constant, next to each other, that may be what another one is added to."""
    count = max(2, -(-(constants[j].rows + MARGIN) // constants[j].view.width))
    a, rows = (sums.of(k, count) if count <= MOST_SUMS else None for k in (i, j))
    if a is None or rows is None or not sums.span(j, rows, a.sum(0)):
        return None
    shares = torch.linalg.lstsq(rows.T, a.sum(0)[:, None]).solution.flatten()
    some = (shares.abs() > shares.abs().max() / 2).nonzero().flatten().tolist()
    return range(some[0], some[0] + len(some)) if some else None


def _ratio(sums: _Sums, i: int, j: int, rows: range | None) -> float:
    """What one constant is multiplied by in another one, or in some of its rows; 0 where they are not alike."""
    a, b = sums.of(i), sums.of(j)
    if a is None or b is None:
        return 0.0
    a, b = a.sum(0), (b if rows is None else b[rows.start : rows.stop]).sum(0)
    ratio = float(a @ b / (b @ b))
    return ratio if bool((a - ratio * b).norm() <= sums.near * a.norm()) else 0.0


def _difference(exact: Sequence[Tensor | None], found: _Alike) -> Tensor:
    """Of each coordinate both derivatives, of which the sum should be zero."""
    a, b = exact[found.bias], exact[found.into]
    if a is None or b is None:
        raise NoDerivativeError("of second order")
    rows = b if found.rows is None else b[found.rows.start : found.rows.stop]
    return torch.stack([a.sum(0), -found.ratio * rows.sum(0)], -1)
