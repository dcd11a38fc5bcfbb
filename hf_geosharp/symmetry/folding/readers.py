"""Parameters that linear maps read with: all of one, or the rows that some maps have of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import nn

from hf_geosharp.symmetry.fold import Reader
from hf_geosharp.symmetry.tracing.events import Linear, Softmax, Trace
from hf_geosharp.symmetry.tracing.features import drawn
from hf_geosharp.symmetry.tracing.graph import NoDerivativeError, gradients

NEAR = 1e-3
"""Relative difference of numbers that are taken for one here; the model decides."""


def private(model: nn.Module, names: Mapping[int, str], trace: Trace) -> set[str]:
    """Names of the parameters that one module owns, and of which no rows are looked up."""
    return owned(model, names) - trace.looked_up


def owned(model: nn.Module, names: Mapping[int, str]) -> set[str]:
    """Names of the parameters that one module owns."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {names[key] for key, count in owners.items() if count == 1 and key in names}


def across(trace: Trace, linear: Linear) -> bool:
    """Whether what it sums over is known to be something else than the features of a norm: tokens, say."""
    axis = trace.feature_axis(linear.source)
    return axis is not None and axis != linear.source_axis % linear.source.ndim


def entries(events: Sequence[Linear]) -> int:
    """How many entries of a parameter linear maps use."""
    return sum(n for _, n in {(x.weight.start, x.outputs * x.inputs) for x in events})


def of_one_place(linear: Linear) -> bool:
    """Whether it is all that a parameter has at one place of its first dimension, which counts experts."""
    return 0 not in (*linear.weight.out, *linear.weight.inner) and linear.outputs * linear.inputs == math.prod(
        linear.weight.shape[1:]
    )


def rows_of(linear: Linear) -> range:
    """Which outputs of a matrix a linear map has; all of them of a weight of more dimensions."""
    weight = linear.weight
    start = weight.start[weight.out[0]] if len(weight.shape) == 2 else 0
    return range(start, start + linear.outputs) if len(weight.shape) == 2 else range(math.prod(weight.shape))


def overlap(rows: range, others: range) -> bool:
    """Whether two ranges have a number in common."""
    return max(rows.start, others.start) < min(rows.stop, others.stop)


def by_norm(trace: Trace, events: Sequence[Linear]) -> Iterator[tuple[str | None, list[Linear], bool]]:
    """Uses of a parameter by the norm that they read, and whether those of its rows read nothing else.

    None stands for all that no norm with weights has written.
    """
    sources = [trace.norm_of(x.source) for x in events]
    for norm in dict.fromkeys(sources):
        mine, others = (
            [x for x, n in zip(events, sources, strict=True) if (n == norm) is its] for its in (True, False)
        )
        yield norm, mine, not any(overlap(rows_of(x), rows_of(other)) for x in mine for other in others)


def reader_of(events: Sequence[Linear], private: set[str], size: int) -> Reader | None:
    """The parameter that these linear maps are of."""
    readers: set[Reader] = set()
    for linear in events:
        weight, bias = linear.weight, linear.bias
        used = (weight.parameter, *([bias.parameter] if bias else ()))
        if linear.grouped or len(weight.inner) != 1 or not private.issuperset(used):
            return None
        if weight.shape[weight.inner[0]] != linear.inputs or linear.inputs != size:
            return None
        # What a multiple of the weight makes of the norm's bias is not what the weight does.
        readers.add(Reader(weight.parameter, weight.inner[0], bias.parameter if bias and linear.exact else None))
    weight = events[0].weight
    if len(readers) > 1:
        return None
    (reader,) = readers
    if entries(events) == math.prod(weight.shape):
        return reader
    if all(of_one_place(x) for x in events):
        return reader  # of experts, some of which no token has reached: to be tried
    rows = sorted({rows_of(x) for x in events}, key=lambda own: own.start)
    if len(weight.shape) != 2 or any(a.stop != b.start for a, b in pairwise(rows)):
        return None
    if any(x.bias and x.bias.start != (rows_of(x).start,) for x in events):
        return None
    return replace(reader, part=(weight.out[0], rows[0].start, rows[-1].stop - rows[0].start))


def shiftable(events: Sequence[Linear], trace: Trace) -> bool:
    """Whether the same can be added to all that these linear maps write: keys, which nothing but a softmax sees."""
    for linear in events:
        bit = trace.leaves.bits([linear.leaf])
        elsewhere = map(trace.behind, (*trace.ends, *(x.source for x in trace.linears)))
        reached = [x for x in trace.softmaxes if trace.behind(x.logits) & bit]
        if any(bits & bit for bits in elsewhere) or not all(_movesrows_of(x, linear) for x in reached) or not reached:
            return False
    return bool(events)


def _movesrows_of(softmax: Softmax, linear: Linear) -> bool:
    """Whether a vector added to all that a linear map writes adds one number to all logits of a row, but those masked.

    That is nothing to a softmax. Logits are linear in keys, so that their derivative says it of any vector. Masked are
    those that have the least value there is, whatever keys are: that a weight is zero may be due to large logits.
    """
    logits, written, weights = softmax.logits, linear.leaf, softmax.leaf.detach()
    if not softmax.direct or weights.shape != logits.shape:
        return False
    vector = drawn((linear.outputs,), written, 6).expand_as(written.movedim(linear.axis, -1)).movedim(-1, linear.axis)
    dummy = torch.zeros_like(logits).requires_grad_()
    try:
        (back,) = gradients(logits, written, dummy, graph=True)
        moved = None if back is None else gradients(back, dummy, vector)[0]
    except NoDerivativeError:
        return False
    if moved is None:
        return False
    masked = (weights == 0) & (moved == 0) & (logits.detach() == logits.detach().min())
    size, counts = float(moved.abs().max()), ~masked.all(-1)
    apart = moved.masked_fill(masked, -math.inf).amax(-1) - moved.masked_fill(masked, math.inf).amin(-1)
    return size > 0 and bool((apart[counts] <= NEAR * size).all())
