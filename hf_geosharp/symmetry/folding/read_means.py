"""Means that nothing has which reads a norm: what a layer norm writes sums to zero in units of its gain.

The same number, in those units, can then be added to all weights that make one coordinate of it. Which norms take out
the mean is tried on a twin of each, on noise; where one has no weights of its own, the graph of the trace says it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.fold import Gain, Reader, ReadMean
from hf_geosharp.symmetry.folding.gains import offset_of
from hf_geosharp.symmetry.folding.readers import (
    across,
    by_norm,
    entries,
    overlap,
    private,
    reader_of,
    rows_of,
    shiftable,
)
from hf_geosharp.symmetry.tracing.events import Linear, Trace
from hf_geosharp.symmetry.tracing.features import NEAR, cancels, drawn
from hf_geosharp.symmetry.tracing.graph import NoDerivativeError, gradients
from hf_geosharp.symmetry.tracing.recorded import Call, mapped
from hf_geosharp.symmetry.tracing.trace import norm_parameters
from hf_geosharp.symmetry.trials.probe import LocalTwin
from hf_geosharp.symmetry.views import Axis, View

EXACT = 1e-9
"""Size, relative to its terms, of a sum that is zero on a twin, in double precision."""


def read_means(
    model: nn.Module, names: Mapping[int, str], trace: Trace, gains: Sequence[Gain]
) -> Iterator[ReadMean]:  # fmt: skip
    """The folds, without names, of the means of what reads layer norms; ``gains`` are those of norms that fold.

    ``names`` are those of the model's parameters, by identity.
    """
    uses = trace.uses
    reads, bare = _reads(trace, uses, private(model, names, trace))
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    folding = {g.module: g for g in gains}
    modules = dict(model.named_modules())
    for path in (path for path in modules if path in reads or path in folding):
        found = _of_norm(modules[path], path, names, trace, folding.get(path), reads.get(path, ()), uses)
        if found is not None:
            yield replace(found, views=tuple(_view(r, shapes[r.weight]) for r in found.readers))
    for reader, events in bare:
        if all(_has_no_mean(trace, x.source.movedim(x.source_axis, -1)) for x in events):
            scope = events[0].scope[-1] if events[0].scope else ""
            yield ReadMean("", scope, None, None, (reader,), (_view(reader, shapes[reader.weight]),))


def _reads(
    trace: Trace, uses: Mapping[str, Sequence[Linear]], alone: set[str]
) -> tuple[dict[str, list[Reader]], list[tuple[Reader, list[Linear]]]]:
    """What reads each norm with weights, and nothing else; and what reads no such norm, with its uses."""
    reads: dict[str, list[Reader]] = {}
    bare: list[tuple[Reader, list[Linear]]] = []
    for events in uses.values():
        for norm, mine, alone_there in by_norm(trace, events):
            if not alone_there:
                continue
            reader = reader_of(mine, alone, mine[0].inputs)
            # Of experts that no token has reached nothing says what they read.
            if reader is None or not all(x.exact for x in mine) or not _used(reader, mine):
                continue
            if norm is None:
                bare.append((reader, mine))
            elif not any(across(trace, x) for x in mine):
                reads.setdefault(norm, []).append(reader)
    return reads, bare


def _used(reader: Reader, events: Sequence[Linear]) -> bool:
    return reader.part is not None or entries(events) == math.prod(events[0].weight.shape)


def _of_norm(
    module: nn.Module, path: str, names: Mapping[int, str], trace: Trace, gain: Gain | None, readers: Sequence[Reader],
    uses: Mapping[str, Sequence[Linear]],
) -> ReadMean | None:  # fmt: skip
    """The fold of what reads one norm, without views; None where there is none."""
    own = norm_parameters(module)
    if own is None or path not in trace.calls or any(id(p) not in names for p in own if p is not None):
        return None
    # A bias that is multiplied, or left out at some places, is not what biases take back.
    if own[1] is not None and path in trace.scaled:
        return None
    twin = LocalTwin(module, _on_noise(trace.calls[path]), names)
    axis = trace.norm_axes.get(path)
    offset = offset_of(own, axis, names, twin) if gain is None else gain.offset
    if offset is None or axis is None or not _centres(own, axis, names, twin, offset):
        return None
    gain_name, bias_name = names[id(own[0])], None if own[1] is None else names[id(own[1])]
    if gain is not None:
        readers = [r for r in gain.readers if all(x.exact for x in uses.get(r.weight, ()))]
    elif bias_name is not None:
        readers = [replace(r, shiftable=not r.bias and shiftable(uses[r.weight], trace)) for r in readers]
    known: dict[int, bool] = {}
    readers = [r for r in readers if _takes_all(r, trace) and (bias_name is None or r.bias or r.shiftable)]
    is_one = partial(_is_one, trace, path, own, offset, known)
    readers = [r for r in readers if all(is_one(x) for x in uses.get(r.weight, ()) if _of(x, r))]
    found = ReadMean("", path, gain_name, bias_name, tuple(readers), (), offset)
    return found if readers and found.usable({gain_name: own[0]}) else None


def _takes_all(reader: Reader, trace: Trace) -> bool:
    """Whether it sums over the features of the norm: of some convolutions each output reads one channel alone."""
    if not reader.points:
        return True
    return all(not x.each for x in trace.convolutions if x.weight == reader.weight)


def _of(linear: Linear, reader: Reader) -> bool:
    """Whether a linear map is of those rows of a parameter that a reader is."""
    if reader.part is None:
        return True
    _, start, size = reader.part
    return overlap(rows_of(linear), range(start, start + size))


def _on_noise(call: Call) -> Call:
    """The call on noise: what a model hands to its norms may have no mean, where some tool has taken that out."""
    generator = torch.Generator().manual_seed(0)

    def noise(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.device) + 0.5

    args, kwargs = mapped((call.args, dict(call.kwargs)), noise)
    return Call(args, kwargs, call.read)


def _centres(
    own: tuple[nn.Parameter, nn.Parameter | None], axis: int, names: Mapping[int, str], twin: LocalTwin, offset: float
) -> bool:
    """Whether what a norm writes has no mean in units of its gain, apart from its bias."""
    written = twin.run(twin.weights)
    if len(written) != 1 or written[0].shape[axis] != own[0].shape[0]:
        return False
    rows = written[0].movedim(axis, -1)
    if own[1] is not None:
        rows = rows - twin.weights[names[id(own[1])]]
    rows = rows / (twin.weights[names[id(own[0])]] + offset)
    return bool((rows.sum(-1).abs() <= EXACT * rows.abs().sum(-1)).all()) and bool((rows != 0).any())


def _is_one(
    trace: Trace, path: str, own: tuple[nn.Parameter, nn.Parameter | None], offset: float, known: dict[int, bool],
    linear: Linear,
) -> bool:  # fmt: skip
    """Whether what a linear map read is, at every place, what a norm with these parameters may write.

    ``known`` is what has been found, by the identity of what was read.
    """
    key = id(linear.source)
    if key not in known:
        rows = linear.source.movedim(linear.source_axis, -1)
        known[key] = linear.inputs == len(own[0]) and _has_no_mean(
            trace, rows, own, offset, trace.before_norm.get(path, (None,))[0]
        )
    return known[key]


def _has_no_mean(
    trace: Trace, rows: Tensor, own: tuple[nn.Parameter | None, nn.Parameter | None] = (None, None),
    offset: float = 0.0, before: Tensor | None = None,
) -> bool:  # fmt: skip
    """Whether rows sum to zero over their features (last), less a bias and in units of a gain, whatever was before.

    The derivatives of the sum in all that it is made of are zero, and those of other sums are not: numbers that rows
    are multiplied by, say, may be one at these weights alone. Where a norm reads the model's input, there are none.
    What a norm read ``before``, if that is known, stands for all that it was made of.
    """
    gain, bias = own
    if rows.shape[-1] < 2 or not rows.requires_grad:
        return False
    v = 1 / (gain.detach().to(rows) + offset) if gain is not None else rows.detach().new_ones(rows.shape[-1])
    if not cancels((rows.detach() - (0 if bias is None else bias.detach().to(rows))) * v):
        return False
    behind = trace.behind(rows)
    if before is not None and before.requires_grad and trace.behind(before) & ~behind == 0:
        later = [s for s in trace.leaves.listed(behind & ~trace.behind(before)) if all(s is not p for p in own)]
        if _cancel(rows, v, [before, *later]):
            return True
    leaves = trace.small(s for s in trace.leaves.listed(behind) if all(s is not p for p in own))
    return _cancel(rows, v, leaves) if leaves else gain is not None


def _cancel(rows: Tensor, v: Tensor, sources: Sequence[Tensor]) -> bool:
    """Whether the sum of rows in units of v has no derivatives in what they are made of, and others have some."""
    noise, other = (drawn(rows.shape[:-1], rows, seed).unsqueeze(-1) for seed in (8, 9))
    try:
        moved, control = (
            sum(float(g.abs().sum()) for g in gradients(rows, sources, weights) if g is not None)
            for weights in (noise * v, other * drawn(rows.shape, rows, 10))
        )
    except NoDerivativeError:
        return False
    return moved <= NEAR * control and control > 0


def _view(reader: Reader, shape: Sequence[int]) -> View:
    """The weight of a reader as (d, outputs)."""
    start, sizes = [0] * len(shape), list(shape)
    if reader.part is not None:
        axis, start[axis], sizes[axis] = reader.part[0], reader.part[1], reader.part[2]
    labels = ["h" if d == reader.in_axis else f"m{d}" for d in range(len(shape))]
    axes = tuple(Axis(label, size, d, 1) for d, (label, size) in enumerate(zip(labels, sizes, strict=True)))
    return View(reader.weight, axes, tuple(start), (), ("h",), tuple(n for n in labels if n != "h"))
