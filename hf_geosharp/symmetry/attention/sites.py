"""Sites of attention read off a trace: which features of which parameters meet, head by head, coordinate by coordinate.

The logit of one query and one key is bilinear in what the query's and the key's linear maps wrote. Its mixed second
derivative couples feature a of the one with feature b of the other, and the features that are coupled, directly or
through others, are one *coordinate* of a head: two features where nothing else happens, four where a rotary embedding
turns pairs of them, a column of a relative-position table more where there is one. The same holds for values and the
columns of the output projection. Nothing is assumed about how heads are laid out: grouped, fused, interleaved or
shared features come out as what they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hf_geosharp.symmetry.attention.alike import Portrait, portrait
from hf_geosharp.symmetry.attention.couplings import Couplings, couplings, single
from hf_geosharp.symmetry.tracing.events import Linear, Softmax, Trace
from hf_geosharp.symmetry.tracing.features import Families, Node, Port, drawn, only
from hf_geosharp.symmetry.tracing.graph import Behind, leaves_behind


@dataclass(eq=False)
class Attention:
    """One softmax that compares, and the linear maps that read what it mixed.

    Attributes:
        outputs: several where each reads some of the tokens, those of texts and those of images say; none if nothing
            reads it.
        scope: the innermost module in which all of it happens.
        qk, vo: what meets in the logits, and in what is read.
        entries: parameters that enter the logits by themselves.
        like: an earlier one that is alike; ``renamed`` says what its parameters are called here.
    """

    softmax: Softmax
    outputs: tuple[Linear, ...]
    scope: str
    qk: Couplings
    vo: Couplings
    entries: tuple[str, ...]
    like: Attention | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)


def attentions(trace: Trace, families: Families) -> Iterator[Attention]:
    """Every softmax whose logits compare one thing with another, or that mixes or weighs, whatever its logits are."""
    known: dict[object, tuple[Portrait, Attention]] = {}
    readers = _readers(trace)
    for softmax in trace.softmaxes:
        # In the order of its own graph, whatever was asked before: attentions that are alike have it in common.
        sources = leaves_behind(softmax.logits)
        outputs = _within(softmax, readers.get(id(softmax.leaf), ()))
        used = [linear for linear in trace.linears if any(linear.leaf is s for s in sources)]
        for output in outputs:
            read = trace.sources(output.source)
            used += [x for x in trace.linears if any(x.leaf is s for s in read)] + [output]
        scope = common([x.scope for x in used] + [softmax.scope])
        here = Attention(softmax, outputs, scope, _NOTHING, _NOTHING, tuple(_others(trace, sources)))
        seen = portrait(trace, softmax, outputs, scope)
        if seen is not None and seen.key in known:
            carried = _carried(*known[seen.key], seen, here, trace, families)
            if carried is not None:
                yield carried
                continue
        ports = list(_ports(trace, families, sources))
        roles = None
        for logits in _layouts(softmax.logits, ports):
            roles = _key_features(logits, ports)
            if roles is not None:
                softmax.logits = logits
                break
        if roles is not None:
            qk = _taken_apart(contracted(softmax.logits), ports, roles)
        elif id(softmax) in trace.mixing:
            keys = _key_features(softmax.logits, ports, learned=True)
            qk = Couplings((), frozenset()) if keys is None else couplings(contracted(softmax.logits), ports, keys)
            if qk.reason or not any(qk.heads):
                qk = Couplings((), frozenset(), _unseen(trace, families, ports))
        elif id(softmax) in trace.weighing - trace.selecting:
            qk = Couplings((), frozenset(), ONE_SIDED)
        else:
            continue
        vo = Couplings((), frozenset(), "no linear map reads what attention mixes")
        if outputs:
            vo = _together([_values(trace, families, softmax, output) for output in outputs])
        found = replace(here, qk=qk, vo=vo)
        if seen is not None:
            known[seen.key] = seen, found
        yield found
    yield from _plain(trace, families)


_NOTHING = Couplings((), frozenset())

PLAIN = "no softmax, or another function, of a product of queries and keys is seen"
"""Of values that are mixed in another way."""


def _plain(trace: Trace, families: Families) -> Iterator[Attention]:
    """Values that meet something computed in a product that no softmax comes from, and the linear map that reads it.

    Keys that are bent each by itself meet values first, and queries then: a matrix for each head, which what is read is
    linear in.
    """
    weights = {id(s.leaf) for s in trace.softmaxes}
    nodes = {p.result.grad_fn for p in trace.compared}
    behind = Behind(lambda node: node if node in nodes else None)
    readers: dict[object, Linear] = {}
    for linear in trace.linears if nodes else ():
        for node in behind.listed(behind.of(linear.source)):
            readers.setdefault(node, linear)
    found: dict[int, Attention] = {}
    for number, product in enumerate(trace.compared):
        output, own = readers.get(product.result.grad_fn), behind.bits([product.result.grad_fn])
        if output is None or any(id(s) in weights for s in trace.sources(output.source)):
            continue
        last = [p.result for p in trace.compared[number:] if behind.of(p.result) & own][-1]
        try:
            vo = _alone(trace, families, product.result, output)
            qk = _NOTHING if vo is None else _bent(trace, families, product.result, last, vo)
        except RuntimeError:  # something was overwritten, or has no second derivatives
            continue
        # What is divided by is a product too, in which heads cannot be told apart.
        if vo is not None and (id(output) not in found or len(vo.heads) > len(found[id(output)].vo.heads)):
            stand_in = Softmax(last, last, product.scope)
            found[id(output)] = Attention(stand_in, (output,), common([product.scope, output.scope]), qk, vo, ())
    yield from found.values()


def _alone(trace: Trace, families: Families, product: Tensor, output: Linear) -> Couplings | None:
    """The columns of an output projection, and the one linear map that what it reads of a product is linear in."""
    place = families.inputs(output)
    if place is None:
        return None
    columns = Port(torch.ones_like(output.source).requires_grad_(), output.source_axis, *place)
    with torch.enable_grad():
        (by_product,) = torch.autograd.grad(output.source, product, columns.tensor, create_graph=True)
        form = by_product * product
    seeds = [torch.zeros(0, dtype=torch.bool), torch.ones(columns.count, dtype=torch.bool)]
    for port in _ports(trace, families, leaves_behind(form)):
        if port.axis is not None and _factors(form, [port, columns], seeds) == [0, 1]:
            found = couplings(contracted(form), [port, columns], seeds)
            if not found.reason:
                return found
    return None


def _bent(trace: Trace, families: Families, product: Tensor, last: Tensor, vo: Couplings) -> Couplings:
    """Queries and keys in the last of the products: all but values, keys by the first of them."""
    values = {family for family, _ in vo.nodes}
    ports = [p for p in _ports(trace, families, trace.sources(last)) if p.axis is not None and p.family not in values]
    keys = {id(s) for s in trace.sources(product)}
    seeds = [torch.full((p.count,), id(p.tensor) in keys) for p in ports]
    if last is product or len({bool(x.any()) for x in seeds}) < 2:
        return Couplings((), frozenset(), PLAIN)
    with torch.enable_grad():
        (by_product,) = torch.autograd.grad(last, product, torch.ones_like(last), create_graph=True)
        found = couplings(contracted(by_product * product), ports, seeds)
    # A sample where some feature is cut off everywhere is no head of the others.
    whole = [i for i, own in enumerate(found.members) if not any(own < other for other in found.members)]
    whole.sort(key=lambda i: sorted(found.members[i]))
    members = tuple(found.members[i] for i in whole)
    return replace(found, heads=tuple(found.heads[i] for i in whole), members=members) if found.heads else found


ONE_SIDED = "its weights come from one side, no query meets a key"
"""Of a softmax that has no queries and keys: none are missed."""


def _carried(
    before: Portrait, found: Attention, seen: Portrait, here: Attention, trace: Trace, families: Families
) -> Attention | None:
    """What was found for an attention, for one that is alike; None where fused weights lie at different places."""
    index: dict[int, int] = {}
    renamed: dict[str, str] = {}
    places = [
        (_place(trace, families, a), _place(trace, families, b)) for a, b in zip(before.ends, seen.ends, strict=True)
    ]
    for old_output, new_output in zip(found.outputs, here.outputs, strict=True):
        places.append((_read(families, old_output), _read(families, new_output)))
    for old, new in places:
        if old is None or new is None:
            if old is not new:
                return None
            continue
        if old.first != new.first or index.setdefault(old.family, new.family) != new.family:
            return None
        for a, b in zip(old.names, new.names, strict=True):
            if renamed.setdefault(a, b) != b:
                return None
    qk, vo = found.qk.among(index), found.vo.among(index)
    if qk is None or vo is None:
        return None
    vo = replace(vo, gain=renamed[vo.gain]) if vo.gain else vo
    return replace(here, qk=qk, vo=vo, like=found, renamed=renamed)


@dataclass(frozen=True)
class _Place:
    """The family of an end of a graph, the index of its first feature there, and the parameters it is of."""

    family: int
    first: int
    names: tuple[str, ...]


def _place(trace: Trace, families: Families, end: Tensor) -> _Place | None:
    linear = next((x for x in trace.linears if x.leaf is end), None)
    if linear is not None:
        return _Place(*families.outputs(linear), _names(linear))
    if id(end) in trace.parameters and end.numel() <= MAX_ENTRIES:
        name = trace.parameters[id(end)]
        return _Place(families.entries(name, end), 0, (name,))
    return None


def _read(families: Families, output: Linear) -> _Place | None:
    place = families.inputs(output)
    return None if place is None else _Place(*place, _names(output))


def _names(linear: Linear) -> tuple[str, ...]:
    return linear.weight.parameter, *((linear.bias.parameter,) if linear.bias is not None else ())


def _unseen(trace: Trace, families: Families, ports: Sequence[Port]) -> str:
    """Why what a softmax that mixes compares cannot be told."""
    mapped = [p for p in ports if p.axis is not None]
    if not mapped:
        return "no linear map of a parameter is seen in what it compares"
    for linear in trace.linears:
        if any(linear.leaf is p.tensor for p in mapped):
            below = list(_ports(trace, families, trace.sources(linear.source)))
            if _key_features(linear.source, below) is not None:
                return "its logits are mixed by a linear map after the comparison"
    return "queries and keys cannot be told apart (a learned query, a single one, attention between channels)"


def _others(trace: Trace, sources: Sequence[Tensor]) -> Iterator[str]:
    for s in sources:
        if id(s) in trace.parameters:
            yield trace.parameters[id(s)]


def common(scopes: Sequence[tuple[str, ...]]) -> str:
    """The innermost module that all of them ran in."""
    common = []
    for level in zip(*scopes, strict=False):
        if len(set(level)) != 1:
            break
        common.append(level[0])
    return common[-1] if common else ""


MAX_ENTRIES = 1 << 20


def _ports(trace: Trace, families: Families, sources: Sequence[Tensor]) -> Iterator[Port]:
    by_leaf = {id(linear.leaf): linear for linear in trace.linears}
    for s in sources:
        linear = by_leaf.get(id(s))
        if linear is not None:
            yield Port(s, linear.axis, *families.outputs(linear))
        elif id(s) in trace.parameters and s.numel() <= MAX_ENTRIES:
            yield Port(s, None, families.entries(trace.parameters[id(s)], s), 0)


def _layouts(logits: Tensor, ports: Sequence[Port]) -> Iterator[Tensor]:
    """Logits (..., queries, keys); where heads lie in that place, with each axis there that may be that of the queries.

    Heads read features of their own; what one query reads another one reads too, if it is not hidden from it, or else
    what other maps write: those of its own stream, beside keys of all. But so it is with samples.
    """
    ports = [p for p in ports if p.axis is not None]
    if logits.ndim < 4 or not ports:
        yield logits
        return
    noise = drawn(logits.shape, logits, 1)

    def nested(axis: int) -> bool:
        read = []
        for index in (0, logits.shape[axis] - 1):
            mask = only(noise, axis, index)
            grads = torch.autograd.grad(logits, [p.tensor for p in ports], mask, retain_graph=True, allow_unused=True)
            read.append([p.features(g).cpu() for p, g in zip(ports, grads, strict=True)])
        own = [(bool((a & ~b).any()), bool((b & ~a).any()), bool((a & b).any())) for a, b in zip(*read, strict=True)]
        before, after, both = (any(x) for x in zip(*own, strict=True))
        return not (before and after) or (both and not any(x and y for x, y, _ in own))

    if nested(-2):
        yield logits
        return
    others = [a for a in reversed(range(logits.ndim - 2)) if logits.shape[a] > 1 and nested(a)]
    yield from (logits.movedim(axis, -2) for axis in others)
    if not others:
        yield logits


def _key_features(logits: Tensor, ports: Sequence[Port], learned: bool = False) -> list[Tensor] | None:
    """For each port the features that belong to keys; None if nothing is compared here.

    A query's features act on its own row of logits alone, a key's on its own column. Queries that are ``learned`` are
    entries of a parameter, not what a linear map wrote.
    """
    if logits.ndim < 3 or logits.shape[-1] < 2:
        return None
    tensors = [p.tensor for p in ports]
    if not tensors:
        return None
    noise = drawn(logits.shape, logits, 1)
    last = [n - 1 for n in logits.shape[-2:]]

    def counted(axis: int, index: int) -> list[Tensor]:
        grads = torch.autograd.grad(logits, tensors, only(noise, axis, index), retain_graph=True, allow_unused=True)
        return [_positions(p, g) for p, g in zip(ports, grads, strict=True)]

    def told(row: list[Tensor], column: list[Tensor]) -> list[Tensor] | None:
        # Of the classes of a router each is a key of its own: what the first key reads no other does.
        keys = [(a > b) & (b > 0) for a, b in zip(row, column, strict=True)]
        for other in columns:
            # Keys of another stream are not in this column.
            keys = [k | ((b == 0) & (a > c) & (c > 0)) for k, a, b, c in zip(keys, row, column, other, strict=True)]
        queries = [(a > 0) & ~(a > b) for a, b in zip(row, column, strict=True)]
        keys = [k if p.axis is not None else torch.zeros_like(k) for k, p in zip(keys, ports, strict=True)]
        asked = any(p.axis is None for p in ports) if learned else any(bool(q.any()) for q in queries)
        return keys if asked and any(bool(k.any()) for k in keys) else None

    def mapped(row: list[Tensor], column: list[Tensor]) -> list[Tensor] | None:
        # Where all keys are mapped to a few, each of those is made of all, and so is a row.
        whole = torch.autograd.grad(logits, tensors, noise, retain_graph=True, allow_unused=True)
        every = [_positions(p, g) for p, g in zip(ports, whole, strict=True)]
        keys = [(a == c) & (b == c) & (c > 1) for a, b, c in zip(row, column, every, strict=True)]
        queries = [(a < c) & (b == c) for a, b, c in zip(row, column, every, strict=True)]
        told_apart = all(bool((k | q | (c == 0)).all()) for k, q, c in zip(keys, queries, every, strict=True))
        asked, answered = (any(bool(x.any()) for x in side) for side in (queries, keys))
        return keys if told_apart and asked and answered else None

    # Where the first key is padding, before the first block say, another one shows which are keys.
    rows = [counted(-2, i) for i in dict.fromkeys((last[0], 0, last[0] // 2))]
    columns = [counted(-1, i) for i in dict.fromkeys((0, last[1] // 2, last[1]))]
    keys = told(max(rows, key=_alive), max(columns, key=_alive))
    if keys is None and last[0]:
        # The last query may be a block of its own, which reads one key: another one reads more.
        rows.append(counted(-2, last[0] - 1))
        keys = told(max(rows, key=_most), max(columns, key=_alive))
    # Of windows that look back few queries read the first key.
    keys = told(max(rows, key=_most), max(columns, key=_most)) if keys is None else keys
    return mapped(max(rows, key=_alive), max(columns, key=_alive)) if keys is None else keys


def _most(counts: Sequence[Tensor]) -> tuple[int, float]:
    """Of how many ports some feature has a derivative, and at how many places all of them have one."""
    return _alive(counts), float(sum(c.sum() for c in counts))


def _alive(counts: Sequence[Tensor]) -> int:
    """Of how many ports some feature has a derivative."""
    return sum(bool(c.any()) for c in counts)


def _positions(port: Port, gradient: Tensor | None) -> Tensor:
    """At how many positions each feature has a derivative, (features,)."""
    if gradient is None or port.axis is None:
        return torch.zeros(port.count)
    return (gradient != 0).movedim(port.axis, -1).flatten(0, -2).sum(0).float().cpu()


MAX_OUTPUTS = 8
"""Linear maps that read what one softmax mixes; where more do, it is in the stream, which all later ones read."""


def _readers(trace: Trace) -> dict[int, tuple[Linear, ...]]:
    """By identity of its leaf, the linear maps that read something made of a softmax; of too many the first."""
    weights = {id(s.leaf) for s in trace.softmaxes}
    readers: dict[int, list[Linear]] = {}
    for linear in trace.linears if weights else ():
        for s in trace.sources(linear.source):
            if id(s) in weights:
                readers.setdefault(id(s), []).append(linear)
    return {leaf: tuple(own if len(own) <= MAX_OUTPUTS else own[:1]) for leaf, own in readers.items()}


def _within(softmax: Softmax, outputs: tuple[Linear, ...]) -> tuple[Linear, ...]:
    """Those in the module that the first one ran in with the softmax: what reads a stream elsewhere is no output."""
    scopes = [softmax.scope, *(x.scope for x in outputs[:1])]
    return tuple(x for x in outputs if common([*scopes, x.scope]) == common(scopes))


def _together(forms: Sequence[Couplings]) -> Couplings:
    """Those of all outputs as one; of the first alone where it has a norm of its own, or could not be taken apart."""
    first = forms[0]
    own = [f for f in forms if not f.reason and f.gain == first.gain]
    if first.reason or len(own) == 1:
        return first
    heads, members = (tuple(x for f in own for x in getattr(f, name)) for name in ("heads", "members"))
    h_side = frozenset[Node]().union(*(f.h_side for f in own))
    partly = next((f.partly for f in own if f.partly), "")
    return Couplings(heads, h_side, "", members, first.gain, partly)


def _values(trace: Trace, families: Families, softmax: Softmax, output: Linear) -> Couplings:
    """Values and the columns of the output projection: the derivative in the attention weights is bilinear.

    A norm on the way, which makes all features act as one, is left out.
    """
    found = _mixed(trace, families, softmax, output, output.source)
    norm = trace.norm_of(output.source)
    if found.reason and norm in trace.before_norm:
        before, gain, _ = trace.before_norm[norm]
        # (Not one that has written what attention mixes.)
        if before.shape == output.source.shape and any(s is softmax.leaf for s in trace.sources(before)):
            without = _mixed(trace, families, softmax, output, before)
            return found if without.reason else replace(without, gain=gain)
    return found


def _mixed(trace: Trace, families: Families, softmax: Softmax, output: Linear, x: Tensor) -> Couplings:
    """The same for what stands at the place of what the output projection reads."""
    place = families.inputs(output)
    if place is None:
        return Couplings((), frozenset(), "the output projection does not read every input")
    columns = torch.ones_like(x).requires_grad_()
    with torch.enable_grad():
        (by_weight,) = torch.autograd.grad(x, softmax.leaf, columns, create_graph=True)
    if not by_weight.requires_grad:
        return Couplings((), frozenset(), "values do not come from a linear map")
    sources = [s for s in leaves_behind(by_weight) if s is not columns and s is not softmax.leaf]
    ports = [*_ports(trace, families, sources), Port(columns, output.source_axis, *place)]
    seeds = [torch.zeros(p.count, dtype=torch.bool) for p in ports]
    seeds[-1] = torch.ones(ports[-1].count, dtype=torch.bool)
    if id(softmax) not in trace.mixing:  # what does not compare need not have queries
        return _taken_apart(contracted(by_weight, 1), ports, seeds)
    found = _NOTHING
    for laid_out in _layouts(by_weight, ports):
        found = _taken_apart(contracted(laid_out), ports, seeds)
        if not found.reason:
            break
    return found


def _taken_apart(form: Tensor, ports: Sequence[Port], seeds: Sequence[Tensor]) -> Couplings:
    """The couplings of a form; where they cannot be told, those without entries, and what each head has one of.

    Where that does not do either, those of the factors that it is bilinear in: not of where values are sampled, say.
    """
    found = couplings(form, ports, seeds)
    if not found.reason:
        return found
    alone = single(found.members)
    kept = [i for i, p in enumerate(ports) if p.axis is not None and p.family not in alone]
    if len(kept) < len(ports):
        less = couplings(form, [ports[i] for i in kept], [seeds[i] for i in kept])
        if not less.reason:
            return less
    factors = _factors(form, ports, seeds)
    less = couplings(form, [ports[i] for i in factors], [seeds[i] for i in factors]) if factors else found
    return found if less.reason else less


def _factors(form: Tensor, ports: Sequence[Port], seeds: Sequence[Tensor]) -> list[int]:
    """Ports that a form is linear in, if those of either side (with seeds, and without) make all of it; else none."""
    generator = torch.Generator().manual_seed(3)
    weights = (torch.rand(form.shape, generator=generator) + 0.5).to(form)
    whole = float((form * weights).sum().detach())
    linear, made = [], [0.0, 0.0]
    for i, port in enumerate(ports):
        (first,) = torch.autograd.grad(form, port.tensor, weights, create_graph=True, allow_unused=True)
        if first is None or port.axis is None:
            continue
        second = None
        if first.requires_grad:
            noise = (torch.rand(first.shape, generator=generator) + 0.5).to(first)
            (second,) = torch.autograd.grad(first, port.tensor, noise, retain_graph=True, allow_unused=True)
        if second is None or not bool(second.any()):
            linear.append(i)
            # By Euler's formula for what is homogeneous.
            made[bool(seeds[i].any())] += float((first * port.tensor).sum().detach())
    return linear if all(math.isclose(x, whole, rel_tol=1e-6) for x in made) else []


def contracted(x: Tensor, axes: int = 2) -> Tensor:
    """Queries and keys summed with random weights: one scalar for each index of the other axes."""
    return (x * drawn(x.shape[-axes:], x, 2)).sum(tuple(range(-axes, 0)))
