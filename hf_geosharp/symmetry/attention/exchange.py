"""Norms of queries and keys: what the one's weights gain, the other's can lose.

With a norm on queries and keys the projections themselves cannot be moved, but the weights of the two norms meet entry
by entry: w_q s and w_k / s give the same logits. A rotary embedding behind the norm ties the two entries that it turns
into each other. Which entries are tied is read off the mixed derivative of the logits in the two weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from hf_geosharp.symmetry.attention.couplings import couplings
from hf_geosharp.symmetry.attention.feature_views import entries_view
from hf_geosharp.symmetry.attention.sites import Attention, contracted
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.tracing.events import Trace
from hf_geosharp.symmetry.tracing.features import Families, Node, Port, drawn
from hf_geosharp.symmetry.tracing.graph import leaves_behind
from hf_geosharp.symmetry.views import View

_LARGEST = 1 << 14


def exchanges(sites: Sequence[Attention], scope: str, trace: Trace, families: Families) -> list[Iterator[Pair]]:
    """Candidate pairs of the weights of norms on queries and keys.

    For each kind of tie (entries that are turned into each other, entries that are free) the weights as they are, and
    as 1 + weight. Sites that read the same keys are one claim.
    """
    edges: list[tuple[Node, Node]] = []
    sides: dict[str, int] = {}
    """-1 or 1 for the side on which a weight stands: queries that share keys all meet the keys' norm from one."""
    tensors: dict[str, Tensor] = {}
    biases = trace.biases
    for site in sites:
        leaves = leaves_behind(site.softmax.logits)
        own = {trace.parameters[id(t)]: t for t in leaves if id(t) in trace.parameters}
        tensors |= own
        weights = [n for n in site.entries if 1 < own[n].numel() <= _LARGEST and n not in biases.values()]
        for k, first in enumerate(weights):
            for second in weights[k + 1 :]:
                q, key = sorted((first, second), key=lambda n: (-own[n].numel(), sides.get(n, 0)))
                if not _few_meet(site.softmax.logits, own[q], own[key]):
                    continue
                sides |= {q: -1, key: 1}
                ports = [Port(own[n], None, families.entries(n, own[n]), 0) for n in (q, key)]
                seeds = [torch.zeros(ports[0].count, dtype=torch.bool), torch.ones(ports[1].count, dtype=torch.bool)]
                found = couplings(contracted(site.softmax.logits), ports, seeds)
                edges += [pair for head in found.heads for pair in head]
                if len(edges) > MAX_EDGES:
                    return []
    tied = ((groups, own) for own in _two_sided(edges) for groups in _ties(own))
    return [_candidates(groups, own, tensors, scope, families, biases) for groups, own in tied]


MAX_EDGES = 1 << 18
"""Entries of norms meet a few others each; where more meet (tables of positions) there is nothing to exchange."""


SAMPLES = 3

FEW = 8


def _few_meet(logits: Tensor, first: Tensor, second: Tensor) -> bool:
    """Whether entries of the second act on the logits together with a few entries of the first, as those of norms do.

    Where they meet most of them (mixing weights, tables), or none (norms of other heads), or too many in all (matrices
    that are normalised), taking all of them apart is long and in vain.
    """
    form = contracted(logits)
    weights = drawn(form.shape, form, 3)
    grads = torch.autograd.grad(form, [first, second], weights, create_graph=True, allow_unused=True)
    if any(g is None or not g.requires_grad for g in grads):
        return False
    active = int((grads[0] != 0).sum())
    own, most = grads[1].flatten(), 0
    entries = own.detach().nonzero().flatten().tolist()
    for entry in entries[:: max(1, own.numel() // SAMPLES)]:
        (met,) = torch.autograd.grad(own[entry], first, retain_graph=True, allow_unused=True)
        most = max(most, 0 if met is None else int((met != 0).sum()))
    return 0 < most <= max(FEW, active // 2) and most * len(entries) <= MAX_EDGES


def _two_sided(edges: Sequence[tuple[Node, Node]]) -> Iterator[Sequence[tuple[Node, Node]]]:
    """The edges; those of two weights at a time where one stands on both sides, a scale beside two norms."""
    if not {f for (f, _), _ in edges} & {f for _, (f, _) in edges}:
        yield edges
        return
    between: dict[tuple[int, int], list[tuple[Node, Node]]] = {}
    for a, b in edges:
        between.setdefault((a[0], b[0]), []).append((a, b))
    yield from between.values()


def _ties(edges: Sequence[tuple[Node, Node]]) -> list[list[list[Node]]]:
    """Entries that hang together, those of one shape in one list."""
    partition: Partition[Node] = Partition()
    for a, b in edges:
        partition.join(a, b)
    alike: dict[object, list[list[Node]]] = {}
    for nodes in partition.groups().values():
        nodes.sort()
        alike.setdefault(tuple(f for f, _ in nodes), []).append(nodes)
    return [sorted(g) for g in alike.values()]


def _candidates(
    groups: Sequence[Sequence[Node]], edges: Sequence[tuple[Node, Node]], tensors: dict[str, Tensor], scope: str,
    families: Families, biases: Mapping[str, str],
) -> Iterator[Pair]:  # fmt: skip
    """The pair of all groups of one shape as copies."""
    second = {f for (f, _), _ in edges}
    if second & {f for _, (f, _) in edges}:
        return
    sides: dict[bool, list[View]] = {False: [], True: []}
    for family in dict.fromkeys(f for f, _ in groups[0]):
        table = torch.tensor([[i for f, i in nodes if f == family] for nodes in groups]).unsqueeze(-1)
        weight = families.members[family].parameter
        views = _of([weight, *([biases[weight]] if weight in biases else [])], table, tensors, families)
        if views is None:
            return
        sides[family in second] += views
    pair = Pair("", "qk_norm", scope, Group(1), tuple(sides[False]), tuple(sides[True]))
    if pair.g and pair.h:
        yield pair
        yield replace(pair, g=_shifted(pair.g, biases), h=_shifted(pair.h, biases))


def joins(pair: Pair, found: Sequence[Pair], families: Families) -> bool:
    """Whether a pair exchanges something that those found do not exchange already, by way of a third weight."""
    shapes = {f.parameter: f.shape for f in families.members}
    partition: Partition[tuple[str, int]] = Partition()
    new = False
    for one in (*found, pair):
        entries: list[list[tuple[str, int]]] = [[] for _ in range(one.copies)]
        for view in (*one.g, *one.h):
            shape = shapes[view.parameter]
            index = view.of(torch.arange(math.prod(shape)).view(shape)).reshape(one.copies, -1)
            for copy, own in zip(entries, index.tolist(), strict=True):
                copy += [(view.parameter, i) for i in own]
        for copy in entries:
            joined = [partition.join(x, copy[0]) for x in copy[1:]]
            new = one is pair and (new or any(joined))
    return new


def _of(names: Sequence[str], table: Tensor, tensors: dict[str, Tensor], families: Families) -> list[View] | None:
    """Views of a norm's weight, and of its bias if it has one."""
    out: list[View] = []
    for name in names:
        if name in tensors and tensors[name].shape == tensors[names[0]].shape:
            views = entries_view(families, families.entries(name, tensors[name]), table)
            if views is None:
                return None
            out += views
    return out


def _shifted(views: tuple[View, ...], biases: Mapping[str, str]) -> tuple[View, ...]:
    return tuple(v if v.parameter in biases.values() else replace(v, shift=1.0) for v in views)
