"""Experts that no token of the example reached: what holds for the one of them that did is tried on the others.

An expert is run by itself, on a copy with random weights: a module of its own on what a sibling of its class was called
with; one of several in the same parameter on the recorded call of them all, with its number and that of the sibling
exchanged wherever whole numbers choose between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.probe import Trials
from hf_geosharp.symmetry.recorded import Call, mapped
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.units import SCALES
from hf_geosharp.symmetry.views import View

Unit = Pair | Scale


def unvisited(
    model: nn.Module, calls: Mapping[str, Call], found: Sequence[Unit], trials: Trials, names: Callable[[str, str], str]
) -> Iterator[Unit]:
    """The hidden units ``found``, of other experts that are alike to theirs; each after it has held on a twin."""
    seen = {_key(u.module, u.g, u.h) for u in found}
    modules = dict(model.named_modules())
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    for unit in found:
        for candidate, call in (*_siblings(unit, modules, calls, shapes), *_others(unit, calls, shapes)):
            key = _key(candidate.module, candidate.g, candidate.h)
            if key in seen:
                continue
            if trials.holds(candidate, candidate.module, SCALES, call):
                seen.add(key)
                yield replace(candidate, name=names(candidate.module, candidate.kind))


def _key(module: str, g: Iterable[View], h: Iterable[View]) -> object:
    return module, tuple(v.region for v in (*g, *h))


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


def _others(
    unit: Unit, calls: Mapping[str, Call], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[Unit, Call]]:
    """The same unit at other places of parameters whose first dimension counts experts."""
    views = (*unit.g, *unit.h)
    counts = {shapes[v.parameter][0] for v in views if v.parameter in shapes}
    at = {v.start[0] for v in views}
    along = any(a.dimension == 0 for v in views for a in v.axes if a.size > 1)
    if unit.module not in calls or len(counts) != 1 or len(at) != 1 or along:
        return
    here, call = at.pop(), calls[unit.module]
    for place in range(counts.pop()):
        if place == here:
            continue
        exchanged, changed = _exchanged((call.args, dict(call.kwargs)), here, place)
        if changed:
            g, h = (tuple(replace(v, start=(place, *v.start[1:])) for v in views) for views in (unit.g, unit.h))
            yield replace(unit, name="", g=g, h=h), Call(*exchanged)


def _exchanged(x: Any, first: int, second: int) -> tuple[Any, bool]:
    """Arguments with two whole numbers exchanged in every tensor of them, and whether there was one to exchange."""
    changed = False

    def exchange(v: Any) -> Any:
        nonlocal changed
        if not isinstance(v, Tensor) or v.is_floating_point() or v.is_complex() or v.dtype == torch.bool:
            return v
        one, other = v == first, v == second
        changed = changed or bool(one.any())
        return torch.where(one, second, torch.where(other, first, v)).to(v.dtype)

    return mapped(x, exchange), changed
