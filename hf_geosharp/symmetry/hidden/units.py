"""Symmetries outside attention, read off a trace: hidden units that scale, and two linear maps in a row.

Where column c of what a linear map reads grows in proportion to feature a of what an earlier one wrote (the linear half
of a gated MLP, a unit behind a ReLU), a number can be pushed from the one to the other. Where a linear map reads what
another wrote and nothing in between (B and A of a LoRA adapter), any invertible matrix can.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_geosharp.symmetry.attention.feature_views import features_view
from hf_geosharp.symmetry.attention.sites import common
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.features import Families, Family, drawn
from hf_geosharp.symmetry.tracing.graph import NoDerivativeError, gradients
from hf_geosharp.symmetry.trials.probe import Trials
from hf_geosharp.symmetry.views import View

_PLACES: tuple[Callable[[int, int], Sequence[range]], ...] = (
    # What is gated and its gate side by side; beside other things they come first or last.
    lambda n, size: (range(size), range(size, 2 * size), range(n - size, n), range(n - 2 * size, n - size)),
    # One after the other.
    lambda n, size: (range(0, 2 * size, 2), range(1, 2 * size, 2)) if n == 2 * size else (),
)
"""Where among n features of a linear map the units may be, of which another one reads so many."""

NEAR = 1e-2
"""Relative difference below which two derivatives are taken for the same here; the twin decides."""


def units(trace: Trace, families: Families, trials: Trials, names: Callable[[str, str], str]) -> Iterator[Pair | Scale]:
    """Pairs of all hidden units, and of maps in a row; each with the largest group that holds on a twin."""
    read: dict[int, list[Linear]] = {}
    leaves = trace.leaves
    mixing = leaves.bits(s.leaf for s in trace.softmaxes)
    side_by_side = Counter(x.scope[-1] for x in trace.linears if x.scope)
    # (Experts read parts of one tensor, which all of them have written.)
    many = max(MANY, 2 * max(side_by_side.values(), default=0))
    stream = leaves.of_many((x.source for x in trace.linears), many)
    written = leaves.bits(x.leaf for x in trace.linears) & ~stream
    for reader in trace.linears:
        behind = trace.behind(reader.source)
        if behind & mixing:
            continue
        for s in _felt(reader, leaves.listed(behind & written)):
            read.setdefault(id(s), []).append(reader)
    seen: set[object] = set()
    taken: set[tuple[int, int]] = set()
    for parts, links in _parts_in_a_row([(w, read.get(id(w.leaf), [])) for w in trace.linears], families):
        if trials.holds(parts, parts.module, SCALES):
            taken |= links
            yield replace(parts, name=names(parts.module, parts.kind))
    candidates: list[list[Pair | Scale]] = []
    several: dict[object, list[Pair | Scale]] = {}
    for writer in trace.linears:
        readers = [r for r in read.get(id(writer.leaf), []) if (id(writer), id(r)) not in taken]
        if not readers or len(readers) > MAX_READERS:
            continue
        for number, alternatives in enumerate(_candidates(writer, readers, families)):
            if alternatives:
                candidates.append(alternatives)
                largest = alternatives[0]
                several.setdefault((number, largest.module, largest.kind), []).append(largest)
    for alike in several.values():
        trials.at_once(alike, alike[0].module, SCALES)
    for alternatives in candidates:
        for pair in alternatives:
            key = tuple(v.region for v in (*pair.g, *pair.h))
            if key in seen:
                break
            if trials.holds(pair, pair.module, SCALES):
                seen.add(key)
                yield replace(pair, name=names(pair.module, pair.kind))
                break


MAX_READERS = 8

MANY = 64
"""Linear maps that depend on what is in the stream, which all later ones read."""

SCALES = (1.0, 100.0)
"""Units are tried on inputs that are large too: what limits them (a clamp) may not show on small ones."""


def _felt(reader: Linear, sources: list[Tensor]) -> list[Tensor]:
    """Those of the sources that reach what the reader reads; experts share a tensor, each reads rows of its own."""
    if len(sources) < 2:
        return sources
    noise = drawn(reader.source.shape, reader.source, 7)
    grads = torch.autograd.grad(reader.source, sources, noise, retain_graph=True, allow_unused=True)
    return [s for s, g in zip(sources, grads, strict=True) if g is not None and bool(g.any())]


def _candidates(writer: Linear, readers: list[Linear], families: Families) -> Iterator[list[Pair | Scale]]:
    """Lists of what units may be, of each the largest group first."""
    outputs = families.outputs(writer)
    sizes = [r.source.shape[r.source_axis] for r in readers]
    simple = set(sizes) == {writer.outputs}
    reached = [None if simple else _reached(writer, r) for r in readers]
    for size in dict.fromkeys(sizes):
        for places in _PLACES:
            inside = (p for p in places(writer.outputs, size) if p.start >= 0 and p.stop <= writer.outputs)
            found = []
            for features in dict.fromkeys(inside):
                own = [
                    r for r, felt in zip(readers, reached, strict=True) if felt is None or bool(felt[features].any())
                ]
                if own and all(r.source.shape[r.source_axis] == size for r in own):
                    in_a_row = _in_a_row(writer, own, outputs, features, families)
                    found.append([*in_a_row, *_scaled(writer, own, outputs, features, families)])
            if any(found):
                yield from found
                return


def _in_a_row(
    writer: Linear, readers: list[Linear], outputs: tuple[int, int], features: range, families: Families
) -> Iterator[Pair]:
    """The pair of two maps in a row, if the second ones read features as they were written."""
    inputs = [families.inputs(r) for r in readers]
    narrow = len(features) <= min(writer.inputs, sum(r.outputs for r in readers))
    if narrow and None not in inputs and all(_same(writer, r, features) for r in readers):
        scope = common([x.scope for x in (writer, *readers)])
        yield from _pair("lora", scope, Group(len(features)), outputs, inputs, features, families)


def _parts_in_a_row(
    written: Sequence[tuple[Linear, Sequence[Linear]]], families: Families
) -> Iterator[tuple[Pair, set[tuple[int, int]]]]:
    """Pairs of two maps in a row, each copy a part of one of them, and which writers and readers they are of.

    One of them is a matrix for each of several parts, that of a head say, of what the other one writes or reads.
    """
    chained: dict[tuple[Family, Family], list[tuple[Linear, Linear]]] = {}
    for writer, readers in written:
        for reader in readers:
            inputs = families.inputs(reader)
            if inputs is not None and reader.source.shape[reader.source_axis] != writer.outputs:
                first, second = (families.members[f] for f in (families.outputs(writer)[0], inputs[0]))
                chained.setdefault((replace(first, start=()), replace(second, start=())), []).append((writer, reader))
    for both in chained.values():
        several: dict[int, list[tuple[Linear, Linear, list[int], list[int]]]] = {}
        for writer, reader in both if len(both) > 1 else ():
            features, columns = _copied(writer, reader)
            if len(features) > 1:
                several.setdefault(len(features), []).append((writer, reader, features, columns))
        for size, links in several.items():
            narrow = all(size <= min(writer.inputs, reader.outputs) for writer, reader, *_ in links)
            shape = (-1, size) if narrow else (-1, 1)
            g = _side(families, [(families.outputs(writer), features) for writer, _, features, _ in links], shape)
            h = _side(families, [(families.inputs(reader), columns) for _, reader, _, columns in links], shape)
            if g and h and len(links) > 1:
                kind, group = ("lora", Group(size)) if narrow else ("mlp", Group(1))
                scope = common([x.scope for link in links for x in link[:2]])
                yield Pair("", kind, scope, group, g, h), {(id(w), id(r)) for w, r, *_ in links}


def _side(
    families: Families, links: Sequence[tuple[tuple[int, int] | None, list[int]]], shape: tuple[int, int]
) -> tuple[View, ...]:
    """One factor of all links: views of the features of each from its first on; none where they are not regular."""
    places = [(*families.along(place[0]), [place[1] + f for f in own]) for place, own in links if place is not None]
    apart = len({place[0] for place, _ in links if place is not None}) > 1
    if apart and len({merged for merged, _, _ in places}) == 1 and places[0][0] is not None:
        family, table = places[0][0], torch.tensor([[first + f for f in own] for _, first, own in places])
    elif apart or links[0][0] is None:
        return ()
    else:
        family, table = links[0][0][0], torch.tensor([own for _, _, own in places])
    views = features_view(families, (family, 0), table.view(shape)) if len(table.unique()) == table.numel() else None
    return tuple(views or ())


def _copied(writer: Linear, reader: Linear) -> tuple[list[int], list[int]]:
    """Which features of what was written are which columns of what is read, as they are, (features, columns)."""
    y, x = (
        t.detach().movedim(axis, -1).flatten(0, -2).T.contiguous()
        for t, axis in ((writer.leaf, writer.axis), (reader.source, reader.source_axis))
    )
    if x.shape[1] != y.shape[1]:
        return [], []
    own = {row.numpy().tobytes(): column for column, row in enumerate(x.cpu())}
    found = [(f, own[key]) for f, row in enumerate(y.cpu()) if (key := row.numpy().tobytes()) in own]
    return [f for f, _ in found], [c for _, c in found]


def _reached(writer: Linear, reader: Linear) -> Tensor:
    """Which features of what was written reach what is read, (features,)."""
    noise = drawn(reader.source.shape, reader.source, 7)
    (gradient,) = torch.autograd.grad(reader.source, writer.leaf, noise, retain_graph=True)
    return (gradient != 0).movedim(writer.axis, -1).flatten(0, -2).any(0)


def _scaled(
    writer: Linear, readers: list[Linear], outputs: tuple[int, int], features: range, families: Families
) -> Iterator[Pair | Scale]:
    """What features may be that columns grow with."""
    scope, inputs = common([x.scope for x in (writer, *readers)]), [families.inputs(r) for r in readers]
    if None in inputs:
        return
    degrees = {_degree(writer, r, features) for r in readers}
    if degrees == {1}:
        for group in (Group(1), Group(1, positive=True)):
            yield from _pair("mlp", scope, group, outputs, inputs, features, families)
    elif degrees == {2}:
        for pair in _pair("mlp", scope, Group(1), outputs, inputs, features, families):
            yield Scale("", "mlp", scope, pair.g, pair.h, 2)


def _pair(
    kind: str, scope: str, group: Group, outputs: tuple[int, int], inputs: list[tuple[int, int] | None],
    features: range, families: Families,
) -> Iterator[Pair]:  # fmt: skip
    # Copies of one coordinate each, or one copy of all.
    shape = (-1, 1) if group.dim == 1 else (1, -1)
    g = features_view(families, outputs, torch.tensor(features).view(shape))
    h = [features_view(families, i, torch.arange(len(features)).view(shape)) for i in inputs if i is not None]
    if g is None or any(x is None for x in h):
        return
    columns = {v.region: v for views in h for v in views or ()}
    yield Pair("", kind, scope, group, tuple(g), tuple(columns.values()))


def _same(writer: Linear, reader: Linear, features: range) -> bool:
    """Whether the reader reads these features as they were written, up to a factor."""
    x, y = reader.source.detach(), writer.leaf.detach()
    if len(features) < writer.outputs:
        chosen = y.movedim(writer.axis, -1)[..., slice(features.start, features.stop, features.step)]
        y = chosen.movedim(-1, writer.axis)
    if x.shape != y.shape or reader.source_axis % x.ndim != writer.axis % y.ndim:
        return False
    factor = float((x * y).sum() / (y * y).sum())
    return _largest(torch.sub(x, y, alpha=factor)) <= NEAR * _largest(x) and factor != 0


def _degree(writer: Linear, reader: Linear, features: range) -> int:
    """k where scaling feature a by 1 + t changes column a by k t relative, for all of them; 0 if there is no such."""
    x, y = reader.source, writer.leaf
    t = drawn((len(features),), y, 5)
    tangent = torch.zeros_like(y)
    chosen = slice(features.start, features.stop, features.step)
    across, written = (z.movedim(writer.axis, -1)[..., chosen] for z in (tangent, y.detach()))
    torch.mul(written, t, out=across)
    dummy = torch.zeros_like(x).requires_grad_()
    try:
        (back,) = gradients(x, y, dummy, graph=True)
        moved = None if back is None else gradients(back, dummy, tangent)[0]
    except NoDerivativeError:  # a function between them that cannot be differentiated twice: no product with a number
        return 0
    if moved is None:
        return 0
    del tangent, across, written, dummy, back
    expected = (x.detach().movedim(reader.source_axis, -1) * t).movedim(-1, reader.source_axis)
    scale = _largest(expected)
    for degree in (1, 2):
        moved = moved - expected
        if _largest(moved) <= NEAR * degree * scale and scale > 0:
            return degree
    return 0


def _largest(x: Tensor) -> float:
    """The largest modulus, without a copy of them all."""
    return float(torch.linalg.vector_norm(x, math.inf))
