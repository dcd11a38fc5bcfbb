"""Norms whose gain (and bias) only linear maps read: seen in a trace, and probed on a twin of the norm."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from hf_geosharp.symmetry.events import Convolution, Linear, Softmax, Trace
from hf_geosharp.symmetry.experts import Readers
from hf_geosharp.symmetry.features import drawn
from hf_geosharp.symmetry.fold import Gain, Reader
from hf_geosharp.symmetry.probe import LocalTwin
from hf_geosharp.symmetry.trace import norm_parameters

NEAR = 1e-3
"""Relative difference of numbers that are taken for one here; the model decides."""


def gains(model: nn.Module, names: Mapping[int, str], trace: Trace) -> Iterator[Gain]:
    """The folds of all norms whose output goes into linear maps, convolutions among them, and nowhere else.

    A linear map counts if the norm is all that it ever reads, and if its parameters are used for nothing else.
    """
    alone = private(model, names, trace)
    uses: dict[str, list[Linear]] = {}
    for linear in trace.linears:
        uses.setdefault(linear.weight.parameter, []).append(linear)
    reads: dict[str, list[Linear]] = {}
    for events in uses.values():
        sources = [trace.norm_of(x.source) for x in events]
        trace.bypassed |= {n for x, n in zip(events, sources, strict=True) if n is not None and _across(trace, x)}
        for norm in dict.fromkeys(sources):
            if norm is None:
                continue
            mine, others = (
                [x for x, n in zip(events, sources, strict=True) if (n == norm) is its] for its in (True, False)
            )
            reads.setdefault(norm, []).extend(mine)
            # A map that reads something else too ends the claim.
            if any(_overlap(_rows(x), _rows(other)) for x in mine for other in others):
                trace.bypassed.add(norm)
    convolved = _convolved(trace, uses)
    experts = Readers(model, trace, names)
    for path, module in model.named_modules():
        readers = reads.get(path, [])
        own = norm_parameters(module)
        if not (readers or path in convolved) or path in trace.bypassed or own is None or path not in trace.calls:
            continue
        if any(id(p) not in names for p in own if p is not None) or (path in trace.scaled and own[1] is not None):
            continue
        mapped = _readers(readers, alone, own[0].shape[0])
        if mapped is None or any(_in_blocks(uses[r.weight]) for r in mapped if r.part):
            continue
        mapped = experts.all_of(path, (*mapped, *convolved.get(path, ())), readers)
        if mapped is None or not alone.issuperset({*(r.weight for r in mapped), *(r.bias or r.weight for r in mapped)}):
            continue
        if own[1] is not None:
            mapped = tuple(
                replace(r, shiftable=not r.bias and _shiftable(uses.get(r.weight, ()), trace)) for r in mapped
            )
        twin = LocalTwin(module, trace.calls[path], names)
        gain = _gain(own, path, trace.norm_axes[path], mapped, names, twin)
        if gain is not None:
            yield gain


def private(model: nn.Module, names: Mapping[int, str], trace: Trace) -> set[str]:
    """Names of the parameters that one module owns, and of which no rows are looked up."""
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {names[key] for key, count in owners.items() if count == 1 and key in names} - trace.looked_up


def _across(trace: Trace, linear: Linear) -> bool:
    """Whether what it sums over is known to be something else than the features of a norm: tokens, say."""
    axis = trace.feature_axis(linear.source)
    return axis is not None and axis != linear.source_axis % linear.source.ndim


def _convolved(trace: Trace, uses: Mapping[str, Sequence[Linear]]) -> dict[str, tuple[Reader, ...]]:
    """The convolutions that read each norm; norms end of which one reads something else, too."""
    used: dict[str, list[Convolution]] = {}
    for convolution in trace.convolutions:
        used.setdefault(convolution.weight, []).append(convolution)
    found: dict[str, dict[Reader, None]] = {}
    for weight, own in used.items():
        sources = {x.norm for x in own}
        readers = {Reader(weight, x.in_axis, x.bias, points=x.points) for x in own}
        for norm in sources:
            if norm is None:
                continue
            if len(sources) > 1 or len(readers) > 1 or weight in uses:
                trace.bypassed.add(norm)
            found.setdefault(norm, {}).update(dict.fromkeys(readers))
    return {norm: tuple(readers) for norm, readers in found.items()}


def _entries(events: Sequence[Linear]) -> int:
    """How many entries of a parameter linear maps use."""
    return sum(n for _, n in {(x.weight.start, x.outputs * x.inputs) for x in events})


def _of_one_place(linear: Linear) -> bool:
    """Whether it is all that a parameter has at one place of its first dimension, which counts experts."""
    return 0 not in (*linear.weight.out, *linear.weight.inner) and linear.outputs * linear.inputs == math.prod(
        linear.weight.shape[1:]
    )


def _in_blocks(uses: Sequence[Linear]) -> bool:
    """Whether some of the equal blocks of a parameter, experts', were not used: they may read the norm, too."""
    weight, blocks = uses[0].weight, {_rows(x) for x in uses}
    sizes = {len(rows) for rows in blocks}
    rest = weight.shape[weight.out[0]] - sum(map(len, blocks))
    return (
        rest > 0
        and len(sizes) == 1
        and all(n % size == 0 for size in sizes for n in (rest, *(b.start for b in blocks)))
    )


def _rows(linear: Linear) -> range:
    """Which outputs of a matrix a linear map has; all of them of a weight of more dimensions."""
    weight = linear.weight
    start = weight.start[weight.out[0]] if len(weight.shape) == 2 else 0
    return range(start, start + linear.outputs) if len(weight.shape) == 2 else range(math.prod(weight.shape))


def _overlap(rows: range, others: range) -> bool:
    return max(rows.start, others.start) < min(rows.stop, others.stop)


def _readers(linears: Sequence[Linear], private: set[str], size: int) -> tuple[Reader, ...] | None:
    """The parameters that read, whole or some rows of them; None where one is used for something else too."""
    events: dict[str, list[Linear]] = {}
    for linear in linears:
        events.setdefault(linear.weight.parameter, []).append(linear)
    found = [_reader(own, private, size) for own in events.values()]
    return None if None in found else tuple(r for r in found if r is not None)


def _reader(events: Sequence[Linear], private: set[str], size: int) -> Reader | None:
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
    if _entries(events) == math.prod(weight.shape):
        return reader
    if all(_of_one_place(x) for x in events):
        return reader  # of experts, some of which no token has reached: to be tried
    rows = sorted({_rows(x) for x in events}, key=lambda own: own.start)
    if len(weight.shape) != 2 or any(a.stop != b.start for a, b in pairwise(rows)):
        return None
    if any(x.bias and x.bias.start != (_rows(x).start,) for x in events):
        return None
    return replace(reader, part=(weight.out[0], rows[0].start, rows[-1].stop - rows[0].start))


def _shiftable(events: Sequence[Linear], trace: Trace) -> bool:
    """Whether the same can be added to all that these linear maps write: keys, which nothing but a softmax sees."""
    for linear in events:
        bit = trace.leaves.bits([linear.leaf])
        elsewhere = (*map(trace.leaves.of_node, trace.ends), *(trace.behind(x.source) for x in trace.linears))
        reached = [x for x in trace.softmaxes if trace.behind(x.logits) & bit]
        if any(bits & bit for bits in elsewhere) or not all(_moves_rows(x, linear) for x in reached) or not reached:
            return False
    return bool(events)


def _moves_rows(softmax: Softmax, linear: Linear) -> bool:
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
        (back,) = torch.autograd.grad(logits, written, dummy, create_graph=True)
        (moved,) = torch.autograd.grad(back, dummy, vector)
    except RuntimeError:  # no derivative to be taken twice
        return False
    masked = (weights == 0) & (moved == 0) & (logits.detach() == logits.detach().min())
    size, counts = float(moved.abs().max()), ~masked.all(-1)
    apart = moved.masked_fill(masked, -math.inf).amax(-1) - moved.masked_fill(masked, math.inf).amin(-1)
    return size > 0 and bool((apart[counts] <= NEAR * size).all())


def _gain(
    own: tuple[nn.Parameter, nn.Parameter | None], path: str, axis: int | None, readers: tuple[Reader, ...],
    names: Mapping[int, str], twin: LocalTwin,
) -> Gain | None:  # fmt: skip
    """The fold of a norm, with the offset (weight or 1 + weight) under which its output scales with the gain.

    Along the ``axis`` that counts its features; None where nothing says which.
    """
    weight, bias = own
    gain_name = names[id(weight)]
    bias_name = names[id(bias)] if bias is not None else None
    base = twin.run(twin.weights)
    if len(base) != 1 or axis is None or base[0].shape[axis] != weight.shape[0]:
        return None
    t = torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(weight.device)
    t = t + 0.5
    for offset in (0.0, 1.0):
        moved = dict(twin.weights)
        moved[gain_name] = (twin.weights[gain_name] + offset) * t - offset
        if bias_name:
            moved[bias_name] = twin.weights[bias_name] * t
        scaled = (base[0].movedim(axis, -1) * t).movedim(-1, axis)
        if torch.allclose(twin.run(moved)[0], scaled, rtol=1e-6, atol=1e-9):
            name = f"{path}.gain" if path else "gain"
            gain = Gain(name, path, gain_name, bias_name, readers, weight.shape[0], offset)
            return gain if usable(gain, {gain_name: weight}) else None
    return None


def usable(gain: Gain, weights: Mapping[str, Tensor]) -> bool:
    """Whether the fold can be done at these weights: β in units of γ needs γ everywhere."""
    if gain.bias is None or gain.folds_bias:
        return True
    return bool((weights[gain.gain].detach() + gain.offset != 0).all())
