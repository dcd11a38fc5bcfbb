"""Tables of features as regular views of the parameters that they are features of."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_geosharp.symmetry.attention.blocks import Block
from hf_geosharp.symmetry.tracing.features import Families, Family
from hf_geosharp.symmetry.views import Axis, View


def views_of(families: Sequence[Family], blocks: Sequence[Block], which: str) -> tuple[View, ...] | None:
    """One factor of blocks of one form, stacked as copies, as views of parameters; None where they are not regular."""
    turned = blocks[0].turned
    sides = [getattr(b, which) for b in blocks]
    views: list[View] = []
    for k, (family_index, _) in enumerate(sides[0]):
        family = families[family_index]
        if any(len(s) <= k or s[k][0] != family_index for s in sides):
            return None
        # (copies, rows, coordinates[, 2])
        try:
            table = torch.tensor([s[k][1] for s in sides], dtype=torch.long)
        except ValueError:
            return None
        made = _views(family, table, turned)
        if made is None:
            return None
        views += made
    return tuple(views)


def features_view(families: Families, place: tuple[int, int], table: Tensor) -> list[View] | None:
    """Views of the features of a linear map that are in a table, (copies, coordinates)."""
    family, first = place
    return _views(families.members[family], table.unsqueeze(1) + first, False)


def entries_view(families: Families, family: int, table: Tensor) -> list[View] | None:
    """Views of a parameter's entries, (copies, rows, 1)."""
    return _views(families.members[family], table, False, alone=True)


def _views(family: Family, table: Tensor, turned: bool, alone: bool = False) -> list[View] | None:
    """The view of a family's features, and that of their biases if they have some; ``alone``: of no other entries."""
    names = ("n", "m", "f", "c") if turned else ("n", "m", "h")
    field = "c" if turned else ""
    axes: list[Axis] = []
    start, rest = list(family.start), table
    for d in family.dimensions:
        inner = math.prod(family.shape[later] for later in family.dimensions[family.dimensions.index(d) + 1 :])
        index, rest = rest // inner, rest % inner
        found = _regular(index, names, d)
        if found is None:
            return None
        start[d] = int(index.flatten()[0])
        axes += [a for a in found if a.size > 1 and a.step]
    complete = _complete(axes, names, table, family.dimensions[0])
    if complete is None:
        return None
    axes = complete if family.across or alone else [_whole(a, family, start, complete) for a in complete]
    across = [Axis("i", family.rows, family.across[0], 1)] if len(family.across) == 1 else [
        Axis(f"i{k}", family.shape[d], d, 1) for k, d in enumerate(family.across)
    ]  # fmt: skip
    copies, dim, rows = _roles(axes, turned)
    out = [
        View(family.parameter, (*axes, *across), tuple(start), copies, dim, (*rows, *(a.name for a in across)), field)
    ]
    if family.bias is not None:
        steps = _regular(table, names, 0)
        flat = None if steps is None else _complete([a for a in steps if a.size > 1], names, table, 0)
        if flat is None:
            return None
        begin = (int(table.flatten()[0]) + family.bias[1],)
        out.append(View(family.bias[0], tuple(flat), begin, *_roles(flat, turned), field))
    return out


def _whole(axis: Axis, family: Family, start: list[int], axes: Sequence[Axis]) -> Axis:
    """Rows that have a dimension of a table to themselves are all of it: other inputs reach the other rows."""
    alone = sum(a.dimension == axis.dimension and a.size > 1 for a in axes) <= 1
    if axis.name[0] != "m" or axis.step != 1 or axis.size == 1 or not alone:
        return axis
    start[axis.dimension] = 0
    return Axis(axis.name, family.shape[axis.dimension], axis.dimension, 1)


def _complete(axes: Sequence[Axis], names: Sequence[str], table: Tensor, dimension: int) -> list[Axis] | None:
    """The axes numbered apart, with those of size one added; None if they do not count every feature once."""
    out: list[Axis] = []
    for name, size in zip(names, table.shape, strict=True):
        own = [a for a in axes if a.name.rstrip("0123456789") == name] or [Axis(name, 1, dimension, 1)]
        out += [Axis(f"{name}{k or ''}", a.size, a.dimension, a.step) for k, a in enumerate(own)]
        if math.prod(a.size for a in own) != size:
            return None
    return out


def _roles(axes: Sequence[Axis], turned: bool) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Names of the axes that count copies, the d of the pair, and rows."""
    by = {letter: tuple(a.name for a in axes if a.name[0] == letter) for letter in "nmhf"}
    return ((*by["n"], *by["f"]), (), by["m"]) if turned else (by["n"], by["h"], by["m"])


def _regular(table: Tensor, names: Sequence[str], dimension: int) -> tuple[Axis, ...] | None:
    """Axes whose steps make up a table of indices, or None. A name that needs several axes gets numbered ones."""
    base = int(table.flatten()[0])
    axes: list[Axis] = []
    total = torch.full_like(table, base)
    for d, name in enumerate(names):
        line = table.movedim(d, -1).reshape(-1, table.shape[d])[0] - base
        shape = [1] * table.ndim
        shape[d] = table.shape[d]
        total = total + line.view(shape)
        steps = _nested(line.tolist())
        if steps is None:
            return None
        for k, (size, step) in enumerate(steps):
            axes.append(Axis(name if k == 0 else f"{name}{k}", size, dimension, step))
    if not bool((total == table).all()) or any(a.step < 0 for a in axes):
        return None
    return tuple(axes)


def _nested(line: list[int]) -> list[tuple[int, int]] | None:
    """(size, step) of nested regular loops, outermost first, that give this list of offsets (which begins with 0)."""
    if len(line) == 1:
        return [(1, 1)]
    step = line[1] - line[0]
    run = 1
    while run < len(line) and line[run] - line[run - 1] == step:
        run += 1
    if run == len(line):
        return [(run, step)]
    if len(line) % run:
        return None
    inner = line[:run]
    outer = line[::run]
    for k, begin in enumerate(outer):
        if [x - begin for x in line[k * run : (k + 1) * run]] != inner:
            return None
    rest = _nested(outer)
    return None if rest is None else [*rest, (run, step)]
