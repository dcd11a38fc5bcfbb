"""Norms whose gain (and bias) only linear maps read: seen in a trace, and probed on a twin of the norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from hf_geosharp.symmetry.fold import Gain, Reader
from hf_geosharp.symmetry.folding.readers import across, by_norm, private, reader_of, rows_of, shiftable
from hf_geosharp.symmetry.hidden.experts import Readers
from hf_geosharp.symmetry.tracing.events import Convolution, Linear, Trace
from hf_geosharp.symmetry.tracing.trace import norm_parameters
from hf_geosharp.symmetry.trials.probe import LocalTwin


def gains(model: nn.Module, names: Mapping[int, str], trace: Trace) -> Iterator[Gain]:
    """The folds of all norms whose output goes into linear maps, convolutions among them, and nowhere else.

    A linear map counts if the norm is all that it ever reads, and if its parameters are used for nothing else.
    """
    alone = private(model, names, trace)
    uses, reads = trace.uses, dict[str, list[Linear]]()
    for events in uses.values():
        for norm, mine, alone_there in by_norm(trace, events):
            if norm is None:
                continue
            reads.setdefault(norm, []).extend(mine)
            # A map that reads something else too ends the claim.
            if not alone_there or any(across(trace, x) for x in mine):
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
                replace(r, shiftable=not r.bias and shiftable(uses.get(r.weight, ()), trace)) for r in mapped
            )
        twin = LocalTwin(module, trace.calls[path], names)
        gain = _gain(own, path, trace.norm_axes[path], mapped, names, twin)
        if gain is not None:
            yield gain


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


def _in_blocks(uses: Sequence[Linear]) -> bool:
    """Whether some of the equal blocks of a parameter, experts', were not used: they may read the norm, too."""
    weight, blocks = uses[0].weight, {rows_of(x) for x in uses}
    sizes = {len(rows) for rows in blocks}
    rest = weight.shape[weight.out[0]] - sum(map(len, blocks))
    return (
        rest > 0
        and len(sizes) == 1
        and all(n % size == 0 for size in sizes for n in (rest, *(b.start for b in blocks)))
    )


def _readers(linears: Sequence[Linear], private: set[str], size: int) -> tuple[Reader, ...] | None:
    """The parameters that read, whole or some rows of them; None where one is used for something else too."""
    events: dict[str, list[Linear]] = {}
    for linear in linears:
        events.setdefault(linear.weight.parameter, []).append(linear)
    found = [reader_of(own, private, size) for own in events.values()]
    return None if None in found else tuple(r for r in found if r is not None)


def _gain(
    own: tuple[nn.Parameter, nn.Parameter | None], path: str, axis: int | None, readers: tuple[Reader, ...],
    names: Mapping[int, str], twin: LocalTwin,
) -> Gain | None:  # fmt: skip
    """The fold of a norm; None where its output does not scale with the gain."""
    weight, bias = own
    offset = offset_of(own, axis, names, twin)
    if offset is None:
        return None
    gain_name, bias_name = names[id(weight)], None if bias is None else names[id(bias)]
    name = f"{path}.gain" if path else "gain"
    gain = Gain(name, path, gain_name, bias_name, readers, weight.shape[0], offset)
    return gain if gain.usable({gain_name: weight}) else None


def offset_of(
    own: tuple[nn.Parameter, nn.Parameter | None], axis: int | None, names: Mapping[int, str], twin: LocalTwin
) -> float | None:
    """What is added to the weights of a norm (0 or 1) to make the gain with which its output scales, or None.

    Along the ``axis`` that counts its features; None where nothing says which.
    """
    weight, bias = own
    gain_name = names[id(weight)]
    base = twin.run(twin.weights)
    if len(base) != 1 or axis is None or base[0].shape[axis] != weight.shape[0]:
        return None
    t = torch.rand(weight.shape[0], generator=torch.Generator().manual_seed(3), dtype=torch.float64).to(weight.device)
    t = t + 0.5
    for offset in (0.0, 1.0):
        moved = dict(twin.weights)
        moved[gain_name] = (twin.weights[gain_name] + offset) * t - offset
        if bias is not None:
            moved[names[id(bias)]] = twin.weights[names[id(bias)]] * t
        scaled = (base[0].movedim(axis, -1) * t).movedim(-1, axis)
        if torch.allclose(twin.run(moved)[0], scaled, rtol=1e-6, atol=1e-9):
            return offset
    return None
