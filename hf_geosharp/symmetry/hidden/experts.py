"""Experts that no token of the example reached: what holds for the one of them that did is tried on the others.

An expert is run by itself, on a copy with random weights: a module of its own on what a sibling of its class was called
with; one of several in the same parameter on the recorded call of them all, with its number and that of the sibling
exchanged wherever whole numbers choose between them. So it is with hidden units, and with norms that experts read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Reader
from hf_geosharp.symmetry.hidden.units import SCALES
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.recorded import Call, mapped
from hf_geosharp.symmetry.trials import narrow
from hf_geosharp.symmetry.trials.narrow import cuts
from hf_geosharp.symmetry.trials.probe import HOLDS, LARGEST, NOTHING, OF_CONTROL, LocalTwin, Trials, deviation

Unit = Pair | Scale


def unvisited(
    model: nn.Module, calls: Mapping[str, Call], found: Sequence[Unit], trials: Trials, names: Callable[[str, str], str]
) -> Iterator[Unit]:
    """The hidden units ``found``, of other experts that are alike to theirs; each after it has held on a twin."""
    seen = {_key(u) for u in found}
    modules = dict(model.named_modules())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    stacked = _stacked(found, calls, shapes)
    _at_once(stacked, calls, trials)
    for unit in found:
        for candidate, call in chain(_siblings(unit, modules, calls, shapes), _others(unit, calls, stacked, seen)):
            key = _key(candidate)
            if key in seen:
                continue
            if trials.holds(candidate, candidate.module, SCALES, call):
                seen.add(key)
                yield replace(candidate, name=names(candidate.module, candidate.kind))


def _key(unit: Unit) -> object:
    return unit.module, tuple(v.region for v in (*unit.g, *unit.h))


def _siblings(
    unit: Unit, modules: Mapping[str, nn.Module], calls: Mapping[str, Call], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Unit, Call]]:
    """The same unit of modules beside its own that were never called and are made alike."""
    parent, _, _ = unit.module.rpartition(".")
    prefix = f"{unit.module}."
    if unit.module not in calls or not all(n.startswith(prefix) for n in unit.parameters):
        return
    own = modules[unit.module]
    for label, other in modules[parent]._modules.items():
        name = f"{parent}.{label}" if parent else label
        if other is None or name in calls or not _alike(own, other):
            continue
        inside = {n: f"{name}.{n.removeprefix(prefix)}" for n in unit.parameters}
        if all(shapes.get(new) == shapes[old] for old, new in inside.items()):
            g, h = (tuple(replace(v, parameter=inside[v.parameter]) for v in views) for views in (unit.g, unit.h))
            yield replace(unit, name="", module=name, g=g, h=h), calls[unit.module]


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether two modules have the same classes, settings and buffers, and parameters of the same shapes."""
    mine, theirs = list(first.named_modules()), list(second.named_modules())
    if first is second or [(n, type(m)) for n, m in mine] != [(n, type(m)) for n, m in theirs]:
        return False
    return all(_same_settings(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))


_PLAIN = (bool, int, float, str, bytes, type(None))


def _same_settings(first: nn.Module, second: nn.Module) -> bool:
    mine, theirs = ({k: v for k, v in vars(m).items() if not k.startswith("_")} for m in (first, second))
    shapes = [{n: (p.shape, p.dtype) for n, p in m.named_parameters(recurse=False)} for m in (first, second)]
    buffers = [dict(m.named_buffers(recurse=False)) for m in (first, second)]
    if mine.keys() != theirs.keys() or shapes[0] != shapes[1] or buffers[0].keys() != buffers[1].keys():
        return False
    same = all(v is theirs[k] or (_plain(v) and _plain(theirs[k]) and v == theirs[k]) for k, v in mine.items())
    return same and all(torch.equal(b, buffers[1][n]) for n, b in buffers[0].items())


def _plain(value: object) -> bool:
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_plain, value)))


@dataclass(frozen=True)
class _Stack:
    """The places of parameters whose first dimension counts experts at which units are alike.

    ``known`` are those at which they have been seen to be, ``count`` is the number of all places.
    """

    known: dict[int, None]
    count: int

    @property
    def missing(self) -> list[int]:
        """The other places."""
        return [place for place in range(self.count) if place not in self.known]


def _stacked(
    found: Sequence[Unit], calls: Mapping[str, Call], shapes: Mapping[str, tuple[int, ...]]
) -> dict[Unit, _Stack]:
    """The stacks of units that lie in one, by the unit at place 0, whether or not that has been found."""
    stacks: dict[Unit, _Stack] = {}
    for unit in found:
        views = (*unit.g, *unit.h)
        counts = {shapes[v.parameter][0] for v in views if v.parameter in shapes}
        along = any(a.dimension == 0 for v in views for a in v.axes if a.size > 1)
        if unit.module in calls and len(counts) == 1 and _place(unit) is not None and not along:
            stacks.setdefault(_at(unit, 0), _Stack({}, counts.pop())).known[unit.g[0].start[0]] = None
    return stacks


def _place(unit: Unit) -> int | None:
    """At which place of the first dimension all views of a unit begin."""
    at = {v.start[0] for v in (*unit.g, *unit.h)}
    return at.pop() if len(at) == 1 else None


def _at(unit: Unit, place: int) -> Unit:
    """The same unit at another place."""
    g, h = (tuple(replace(v, start=(place, *v.start[1:])) for v in views) for views in (unit.g, unit.h))
    return replace(unit, name="", g=g, h=h)


def _at_once(stacks: Mapping[Unit, _Stack], calls: Mapping[str, Call], trials: Trials) -> None:
    """Tries the units of experts that no token reached, as many of them together as were reached."""
    for first, stack in stacks.items():
        call, missing, reached = calls[first.module], stack.missing, list(stack.known)
        for start in range(0, len(missing), len(reached)):
            few = missing[start : start + len(reached)]
            exchanged, changed = _exchanged((call.args, dict(call.kwargs)), dict(zip(reached, few, strict=False)))
            if changed:
                trials.at_once([_at(first, place) for place in few], first.module, SCALES, Call(*exchanged))


def _others(
    unit: Unit, calls: Mapping[str, Call], stacks: Mapping[Unit, _Stack], seen: Container[object]
) -> Iterator[tuple[Unit, Call]]:
    """The same unit at those places of its stack at which it has not been seen."""
    here = _place(unit)
    stack = None if here is None else stacks.get(_at(unit, 0))
    if stack is None or here is None:
        return
    call = calls[unit.module]
    for place in stack.missing:
        other = _at(unit, place)
        exchanged, changed = _exchanged((call.args, dict(call.kwargs)), {here: place})
        if changed:
            yield other, Call(*exchanged)
            if _key(other) in seen:
                stack.known[place] = None


def _exchanged(x: Any, swaps: Mapping[int, int]) -> tuple[Any, bool]:
    """Arguments with pairs of whole numbers exchanged in every tensor of them, and whether there was any of those."""
    changed = False

    def exchange(v: Any) -> Any:
        nonlocal changed
        if not isinstance(v, Tensor) or v.is_floating_point() or v.is_complex() or v.dtype == torch.bool:
            return v
        result = v.clone()
        for first, second in swaps.items():
            one, other = v == first, v == second
            changed = changed or bool(one.any())
            result[one], result[other] = second, first
        return result

    return mapped(x, exchange), changed


class Readers:
    """Who reads a norm beside those experts that were seen to: tried on the others."""

    def __init__(self, model: nn.Module, trace: Trace, names: Mapping[int, str]) -> None:
        self._modules, self._names, self._trace = dict(model.named_modules()), names, trace
        self._called = trace.calls.keys() | {n for x in trace.linears for n in x.scope}
        self._owned = {
            name: {names[id(p)]: tuple(p.shape) for p in module.parameters() if id(p) in names}
            for name, module in self._modules.items()
        }

    def all_of(self, norm: str, readers: Sequence[Reader], uses: Sequence[Linear]) -> tuple[Reader, ...] | None:
        """The readers of a norm, with those that no token reached; None where one of these may be another.

        ``uses`` are the linear maps that were seen to read it, which are those of the ``readers``.
        """
        if not all(self._same_places(module, own) for module, own in self._stacked(readers, uses)):
            return None
        more: list[Reader] = []
        for reading, idle in self._beside(norm, readers):
            # Where one alone was called nothing says that others would get the same.
            if len(reading) == 1:
                return None
            own = [r for r in readers if r.weight in self._owned[reading[0]]]
            for module in idle:
                theirs = [_renamed(r, reading[0], module) for r in own]
                if not self._reads(reading[0], own, module, theirs):
                    return None
                more += theirs
        return tuple(dict.fromkeys((*readers, *more)))

    def _beside(self, norm: str, readers: Sequence[Reader]) -> Iterator[tuple[list[str], list[str]]]:
        """Modules with numbers that read the norm, and those beside them, of the same class, that were not called."""
        reading: dict[str, dict[str, None]] = {}
        for reader in readers:
            path = reader.weight.split(".")
            for n in range(1, len(path)):
                parent, module = ".".join(path[: n - 1]), ".".join(path[:n])
                # Of layers each has norms of its own.
                if path[n - 1][-1:].isdigit() and not f"{norm}.".startswith(f"{module}."):
                    reading.setdefault(parent, {})[module] = None
        for parent, modules in reading.items():
            made = type(self._modules[next(iter(modules))])
            beside = (f"{parent}.{n}" if parent else n for n in self._modules[parent]._modules if n[-1:].isdigit())
            idle = [m for m in beside if m not in self._called and type(self._modules.get(m)) is made]
            if idle:
                yield list(modules), idle

    def _reads(self, module: str, own: Sequence[Reader], sibling: str, theirs: Sequence[Reader]) -> bool:
        """Whether a module that was not called reads what one of its class was called with as that does."""
        here, there = self._owned[module], self._owned[sibling]
        if any(there.get(b.weight) != here[a.weight] for a, b in zip(own, theirs, strict=True)):
            return False
        call = self._trace.calls.get(module)
        if call is None:
            return not self._modules[module]._modules  # a linear map, as its class is
        if max(sum(p.numel() for p in self._modules[m].parameters()) for m in (module, sibling)) > LARGEST:
            return False
        try:
            found = [
                _told_by(LocalTwin(self._modules[m], call, self._names), call, readers, self._owned[m])
                for m, readers in ((module, own), (sibling, theirs))
            ]
        except Exception:  # its code may raise anything where it is run by itself
            return False
        return bool(found[0] & found[1])

    @staticmethod
    def _stacked(readers: Sequence[Reader], uses: Sequence[Linear]) -> Iterator[tuple[str, list[Linear]]]:
        """The linear maps of parameters whose first dimension counts experts, by the module in which they ran."""
        whole = {r.weight for r in readers if r.part is None}
        found: dict[str, list[Linear]] = {}
        for x in uses:
            if 0 not in (*x.weight.out, *x.weight.inner) and x.weight.parameter in whole:
                found.setdefault(x.scope[-1] if x.scope else "", []).append(x)
        yield from found.items()

    def _same_places(self, module: str, own: Sequence[Linear]) -> bool:
        """Whether those places of stacked parameters that were not used read what the others do."""
        count, seen = own[0].weight.shape[0], sorted({x.weight.start[0] for x in own})
        missing = sorted(set(range(count)) - set(seen))
        if not missing:
            return True
        readers = [Reader(*key, None) for key in dict.fromkeys((x.weight.parameter, x.weight.inner[0]) for x in own)]
        call, shapes = self._trace.calls.get(module), self._owned[module]
        if call is None or any(r.weight not in shapes or shapes[r.weight][0] != count for r in readers):
            return False
        for cut in (*cuts(self._trace, module, shapes), narrow.WHOLE):
            if sum(cut.left(n, shape) for n, shape in shapes.items()) > LARGEST:
                continue
            try:
                twin = LocalTwin(self._modules[module], call, self._names, cut)
                told = _told_by(twin, call, readers, shapes)
            except Exception:  # its code may raise anything on so little
                continue
            for i in range(0, len(missing), len(seen)):
                few = missing[i : i + len(seen)]
                swaps = dict(zip(seen, few, strict=False))
                (args, kwargs), changed = _exchanged((call.args, dict(call.kwargs)), swaps)
                told &= _told_by(twin, Call(args, kwargs, call.read), readers, shapes, few) if changed else set()
            return bool(told)
        return False


def _renamed(reader: Reader, module: str, other: str) -> Reader:
    """The same reader of another module."""

    def new(name: str) -> str:
        return f"{other}{name.removeprefix(module)}"

    return replace(reader, weight=new(reader.weight), bias=None if reader.bias is None else new(reader.bias))


def _told_by(
    twin: LocalTwin,
    call: Call,
    readers: Sequence[Reader],
    shapes: Mapping[str, Sequence[int]],
    felt: Sequence[int] = (),
) -> set[int]:
    """Numbers of the arguments that the readers read and nothing else does.

    What such an argument times any numbers, one for each feature, changes, the readers divided by them take back. None
    where one of the places of the readers that have to be ``felt`` is not used.
    """
    first, generator = readers[0], torch.Generator().manual_seed(5)
    factors = torch.rand(shapes[first.weight][first.in_axis], generator=generator, dtype=torch.float64) + 0.5
    divided = dict(twin.weights)
    for r in readers:
        weight = twin.weights[r.weight]
        ends = [1] * (weight.ndim - 1 - r.in_axis)
        divided[r.weight] = weight / factors[: weight.shape[r.in_axis]].to(weight.device).view(-1, *ends)
    twin.replay(call)
    base = twin.run(twin.weights)
    for place in felt:
        without = {r.weight: twin.weights[r.weight].clone() for r in readers}
        for weight in without.values():
            weight[place] = 0
        if deviation(twin.run({**twin.weights, **without}), base) <= NOTHING:
            return set()
    found: set[int] = set()
    for number, scaled in enumerate(_scaled(call, factors)):
        twin.replay(scaled)
        moved, control = (deviation(twin.run(weights), base) for weights in (divided, twin.weights))
        if moved < min(HOLDS, OF_CONTROL * control):
            found.add(number)
    return found


def _scaled(call: Call, factors: Tensor) -> Iterator[Call]:
    """The call with each of those arguments times the factors that have as many features, one after the other."""
    arguments: list[Tensor] = []

    def note(v: Any) -> Any:
        if isinstance(v, Tensor) and v.is_floating_point() and v.ndim > 1 and v.shape[-1] == len(factors):
            arguments.append(v)
        return v

    given = call.args, dict(call.kwargs)
    mapped(given, note)
    for own in arguments:

        def scale(v: Any, own: Tensor = own) -> Any:
            return v.double() * factors.to(v.device) if v is own else v

        args, kwargs = mapped(given, scale)
        yield Call(args, kwargs, call.read)
