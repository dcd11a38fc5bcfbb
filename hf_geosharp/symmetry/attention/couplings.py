"""Which features meet: the mixed second derivatives of a bilinear form, taken apart into heads."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.symmetry.tracing.features import Node, Port, drawn, only

Edges = dict[tuple[Node, Node], float]


@dataclass(frozen=True)
class Couplings:
    """Which features of a form act on which: for each head (second factor's, first factor's) -> derivative."""

    heads: tuple[Edges, ...]
    h_side: frozenset[Node]
    reason: str = ""
    members: tuple[frozenset[Node], ...] = ()
    """All features of linear maps that each head depends on, whether or not they were taken apart."""
    gain: str = ""
    """Of a norm that stands between the two factors and was left out: the parameter."""
    partly: str = ""
    """Why some of the features, which are in no edge, could not be told apart."""

    @property
    def nodes(self) -> set[Node]:
        """All features that take part."""
        return {n for own in self.heads for pair in own for n in pair}.union(*self.members)

    def among(self, families: Mapping[int, int]) -> Couplings | None:
        """The same for features of other families; None where one of its own is none of those given."""
        try:
            heads = tuple(
                {((families[f], i), (families[g], k)): v for ((f, i), (g, k)), v in own.items()} for own in self.heads
            )
            sides = [frozenset((families[f], i) for f, i in nodes) for nodes in (self.h_side, *self.members)]
        except KeyError:
            return None
        return Couplings(heads, sides[0], self.reason, tuple(sides[1:]), self.gain, self.partly)


def single(heads: Iterable[Iterable[Node]]) -> set[int]:
    """Families of which each head has one feature, where others have several; ``heads`` gives the nodes of each.

    A head's gate, the bias of that, a factor of its logits: it meets all coordinates of the head and does not make them
    one.
    """
    most: dict[int, int] = {}
    for own in heads:
        for family, count in Counter(f for f, _ in own).items():
            most[family] = max(most.get(family, 0), count)
    return {f for f, n in most.items() if n == 1} if any(n > 1 for n in most.values()) else set()


MAX_HEADS = 4096

MAX_SLOTS = 4096

MAX_ROUNDS = 3

MAX_PARTNERS = 4
"""Features of one map that one feature may meet in a head: one, or two that are turned; more hang together."""


def couplings(form: Tensor, ports: Sequence[Port], seeds: Sequence[Tensor]) -> Couplings:
    """Takes a form apart into heads and finds which features meet in each.

    Args:
        form: scalars (lead axes), one of which (or several) are a head's; with a graph to the ports.
        ports: what it may depend on.
        seeds: for each port which features are of the second factor (H side).
    """
    weights = drawn(form.shape, form, 0)
    tensors = [p.tensor for p in ports]
    first = torch.autograd.grad(form, tensors, weights, create_graph=True, allow_unused=True)
    masks = _head_masks(form, ports, weights, first)
    h_side = frozenset(_nodes(ports, seeds))
    if len(masks) > MAX_HEADS:
        return Couplings((), h_side, f"{len(masks)} heads are more than can be told apart")
    heads = [m for m in _members(form, ports, masks) if any(bool(x.any()) for x in m)]
    if not heads:
        return Couplings((), h_side, "nothing that can be told apart enters")
    edges: list[Edges] = [{} for _ in heads]
    mixed: dict[Node, str] = {}
    reason = _couple(ports, first, seeds, heads, edges, mixed)
    done = set(h_side)
    for _ in range(MAX_ROUNDS):
        # What a key meets may meet more than keys: a table of relative positions, say.
        met = {n for own in edges for pair in own for n in pair}
        known = [_among(p, met) for p in ports]
        missing = any(
            bool((own[i] & ~those).any()) for i, those in enumerate(known) if first[i] is not None for own in heads
        )
        by_itself = any(p.axis is None and p.family in {f for f, _ in met} for p in ports)
        if reason or not (missing or by_itself) or met <= done:
            break
        reason = _couple(ports, first, [_among(p, met - done) for p in ports], heads, edges, mixed)
        done |= met
    _drop_common(ports, edges, h_side)
    # What is only added to the form, a bias that a map computes, is no feature of a head.
    kinds = {n[0] for own in edges for pair in own for n in pair} | {f for f, _ in mixed}
    meeting = [i for i, p in enumerate(ports) if p.axis is not None and p.family in kinds]
    nodes = [frozenset(_nodes([ports[i] for i in meeting], [own[i] for i in meeting])) for own in heads]
    apart = tuple({pair: v for pair, v in own.items() if not mixed.keys() & set(pair)} for own in edges)
    partly = next(iter(mixed.values()), "")
    return Couplings(apart, h_side, reason or ("" if any(apart) else partly), tuple(nodes), partly=partly)


def _drop_common(ports: Sequence[Port], edges: Sequence[Edges], h_side: frozenset[Node]) -> None:
    """Takes out parameters that act on both sides, a table of rotations say: they are no feature of either."""
    entries = {p.family for p in ports if p.axis is None}
    side = dict.fromkeys(h_side, True)
    for _ in range(MAX_ROUNDS + 1):
        for a, b in (pair for own in edges for pair in own if pair[0][0] not in entries and pair[1][0] not in entries):
            for x, y in ((a, b), (b, a)):
                if x in side:
                    side.setdefault(y, not side[x])
    sides: dict[Node, set[bool]] = {}
    for own in edges:
        for a, b in own:
            for x, y in ((a, b), (b, a)):
                if x[0] in entries and y in side:
                    sides.setdefault(x, set()).add(side[y])
    common = {node for node, both in sides.items() if len(both) == 2}
    for own in edges:
        for pair in [p for p in own if p[0] in common or p[1] in common]:
            del own[pair]


def _among(port: Port, nodes: set[Node] | frozenset[Node]) -> Tensor:
    """Which features of a port are among some nodes."""
    out = torch.zeros(port.count, dtype=torch.bool)
    index = [i - port.first for family, i in nodes if family == port.family and 0 <= i - port.first < port.count]
    out[index] = True
    return out


def _couple(
    ports: Sequence[Port], first: Sequence[Tensor | None], seeds: Sequence[Tensor], heads: Sequence[list[Tensor]],
    edges: Sequence[Edges], mixed: dict[Node, str],
) -> str:  # fmt: skip
    """Adds what the seeds meet to the edges of each head; returns why it could not be told, if so.

    What acts as one with others, a head or a part of it that is normalised, goes to ``mixed`` instead, with the reason.
    """
    # Features that no head shares can be looked at together.
    slots = _slots(ports, seeds, heads)
    if len(slots) > MAX_SLOTS:
        return f"{len(slots)} coordinates are more than can be told apart"
    tensors = [p.tensor for p in ports]
    for features in slots:
        known = {i: {k for f, k in mixed if f == ports[i].family} for i in features}
        slot = {i: [f for f in fs if ports[i].first + f not in known[i]] for i, fs in features.items()}
        wanted = [(i, g) for i, g in enumerate(first) if slot.get(i) and g is not None and g.requires_grad]
        if not wanted:
            continue
        second = torch.autograd.grad(
            [g for _, g in wanted], tensors, [ports[i].one_hot(slot[i]) for i, _ in wanted],
            retain_graph=True, allow_unused=True,
        )  # fmt: skip
        sums = [p.sums(s).cpu() for p, s in zip(ports, second, strict=True)]
        there = [p.features(s).cpu() for p, s in zip(ports, second, strict=True)]
        for own, found in zip(heads, edges, strict=True):
            mine = [(i, f) for i, fs in slot.items() for f in fs if bool(own[i][f])]
            if not mine:
                continue
            if len(mine) > 1:
                return "coordinates of one head could not be told apart"
            i, f = mine[0]
            node = (ports[i].family, ports[i].first + f)
            met = [(p, (there[j] & own[j]).nonzero().flatten().tolist()) for j, p in enumerate(ports)]
            most = max((len(partners) for port, partners in met if port.axis is not None), default=0)
            if most > MAX_PARTNERS:
                text = f"{most} features act as one (a norm or a mixing of coordinates)"
                mixed |= {(p.family, p.first + k): text for p, partners in met for k in partners} | {node: text}
                continue
            for port, partners in met:
                for partner in partners:
                    other = (port.family, port.first + partner)
                    if (other, node) not in found:
                        found[node, other] = float(sums[ports.index(port)][partner])
    return ""


def _head_masks(form: Tensor, ports: Sequence[Port], weights: Tensor, first: Sequence[Tensor | None]) -> list[Tensor]:
    """One weighting of the form for each combination of indices that may be a head."""
    everything = [p.features(g) for p, g in zip(ports, first, strict=True)]
    carrying = []
    for axis, size in enumerate(form.shape):
        if size == 1:
            continue
        mask = only(weights, axis, 0)
        part = torch.autograd.grad(form, [p.tensor for p in ports], mask, retain_graph=True, allow_unused=True)
        features = [p.features(g) for p, g in zip(ports, part, strict=True)]
        if any(int(a.sum()) < int(b.sum()) for a, b in zip(features, everything, strict=True)):
            carrying.append(axis)
    if not carrying:
        return [weights]
    masks = []
    sizes = [form.shape[a] for a in carrying]
    for k in range(min(math.prod(sizes), MAX_HEADS + 1)):
        mask, rest = torch.zeros_like(weights), k
        view, source = mask, weights
        for axis, n in sorted(zip(carrying, sizes, strict=True), reverse=True):
            index, rest = rest % n, rest // n
            view, source = view.narrow(axis, index, 1), source.narrow(axis, index, 1)
        view.copy_(source)
        masks.append(mask)
    return masks


def _members(form: Tensor, ports: Sequence[Port], masks: Sequence[Tensor]) -> list[list[Tensor]]:
    """For each head (each once) its features in every port."""
    out: list[list[Tensor]] = []
    seen: set[bytes] = set()
    # What is kept has memory of its own, all at once: between the gradients it would keep theirs from being used again.
    tables = [torch.empty(len(masks), p.count, dtype=torch.bool) for p in ports]
    for mask in masks:
        part = torch.autograd.grad(form, [p.tensor for p in ports], mask, retain_graph=True, allow_unused=True)
        rows = [t[len(out)].copy_(p.features(g)) for t, p, g in zip(tables, ports, part, strict=True)]
        key = hashlib.sha256(b"".join(r.numpy().tobytes() for r in rows)).digest()
        if key not in seen:
            seen.add(key)
            out.append(rows)
    return out


def _slots(ports: Sequence[Port], seeds: Sequence[Tensor], heads: Sequence[list[Tensor]]) -> list[dict[int, list[int]]]:
    """Features of the H side in groups of which no head has two."""
    classes: dict[frozenset[int], list[tuple[int, int]]] = {}
    for i in range(len(ports)):
        if not len(seeds[i]):
            continue
        table = torch.stack([h[i] for h in heads]) & seeds[i].cpu()
        for f in table.any(0).nonzero().flatten().tolist():
            inside = frozenset(table[:, f].nonzero().flatten().tolist())
            classes.setdefault(inside, []).append((i, f))
    slots: list[dict[int, list[int]]] = []
    used: dict[int, int] = {}
    for inside, features in classes.items():
        at = max((used.get(h, 0) for h in inside), default=0)
        for i, f in features:
            while len(slots) <= at:
                slots.append({})
            slots[at].setdefault(i, []).append(f)
            at += 1
        for h in inside:
            used[h] = at
    return slots


def _nodes(ports: Sequence[Port], seeds: Sequence[Tensor]) -> set[Node]:
    return {
        (p.family, p.first + f)
        for p, s in zip(ports, seeds, strict=True)
        for f in (s.nonzero().flatten().tolist() if len(s) else ())
    }
