"""Sites of attention read off a trace: which features of which parameters meet, head by head, coordinate by coordinate.

The logit of one query and one key is bilinear in what the query's and the key's linear maps wrote. Its mixed second
derivative couples feature a of the one with feature b of the other, and the features that are coupled, directly or
through others, are one *coordinate* of a head: two features where nothing else happens, four where a rotary embedding
turns pairs of them, a column of a relative-position table more where there is one. The same holds for values and the
columns of the output projection. Nothing is assumed about how heads are laid out: grouped, fused, interleaved or
shared features come out as what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.symmetry.trace import Linear, Softmax, Trace
from hf_geosharp.symmetry.views import Axis, View

Node = tuple[int, int]
"""A feature: which family, and which index in it."""


@dataclass(frozen=True)
class Family:
    """Features of one kind: outputs (or inputs) of linear maps, or entries of a parameter that is used by itself.

    Attributes:
        parameter: its name.
        dimensions: which of its dimensions count the features (several: together, the last one fastest).
        across: which are its rows; none for entries.
        start: where the linear map's part of the parameter begins in the other dimensions.
        rows: how many rows there are.
        shape: of the parameter.
        bias: the parameter and index of the bias of feature 0.
    """

    parameter: str
    dimensions: tuple[int, ...]
    across: tuple[int, ...]
    start: tuple[int, ...]
    rows: int
    shape: tuple[int, ...]
    bias: tuple[str, int] | None = None


@dataclass(eq=False)
class Port:
    """A tensor of the graph whose features take part: which family they are of, and where its first is in it."""

    tensor: Tensor
    axis: int | None
    family: int
    first: int

    def features(self, gradient: Tensor | None) -> Tensor:
        """Which features have a derivative that is not zero anywhere: (features,) booleans."""
        return self.sizes(gradient) != 0

    def sizes(self, gradient: Tensor | None) -> Tensor:
        """Largest modulus of the derivative of each feature, (features,)."""
        if gradient is None:
            return torch.zeros(self.count)
        if self.axis is None:
            return gradient.detach().abs().flatten()
        return gradient.detach().abs().movedim(self.axis, -1).flatten(0, -2).amax(0)

    def sums(self, gradient: Tensor | None) -> Tensor:
        """Sum of the derivative over everything but features, (features,)."""
        if gradient is None:
            return torch.zeros(self.count)
        if self.axis is None:
            return gradient.detach().flatten()
        return gradient.detach().movedim(self.axis, -1).flatten(0, -2).sum(0)

    @property
    def count(self) -> int:
        """How many features it has."""
        return self.tensor.numel() if self.axis is None else self.tensor.shape[self.axis]

    def one_hot(self, features: Sequence[int]) -> Tensor:
        """Ones at these features, everywhere."""
        out = torch.zeros_like(self.tensor)
        if self.axis is None:
            out.view(-1)[list(features)] = 1
        else:
            out.movedim(self.axis, -1)[..., list(features)] = 1
        return out


class Families:
    """The families of a model, each once: maps that share a parameter have features in common."""

    def __init__(self) -> None:
        self.members: list[Family] = []
        self._index: dict[Family, int] = {}

    def outputs(self, linear: Linear) -> tuple[int, int]:
        """(family, index of the first feature) of what a linear map writes."""
        slab = linear.weight
        first = slab.start[slab.out[0]] if len(slab.out) == 1 else 0
        start = tuple(0 if d in slab.out else s for d, s in enumerate(slab.start))
        bias = None
        if linear.bias is not None:
            bias = linear.bias.parameter, linear.bias.start[0] - first
        return self._add(Family(slab.parameter, slab.out, slab.inner, start, linear.inputs, slab.shape, bias)), first

    def inputs(self, linear: Linear) -> tuple[int, int] | None:
        """The same of what it reads; None where not every output reads every input."""
        slab = linear.weight
        if linear.grouped:
            return None
        first = slab.start[slab.inner[0]] if len(slab.inner) == 1 else 0
        start = tuple(0 if d in slab.inner else s for d, s in enumerate(slab.start))
        return self._add(Family(slab.parameter, slab.inner, slab.out, start, linear.outputs, slab.shape)), first

    def entries(self, name: str, parameter: Tensor) -> int:
        """Family of a parameter's own entries."""
        everything = tuple(range(parameter.ndim))
        return self._add(Family(name, everything, (), (0,) * parameter.ndim, 1, tuple(parameter.shape)))

    def _add(self, family: Family) -> int:
        if family not in self._index:
            self._index[family] = len(self.members)
            self.members.append(family)
        return self._index[family]


@dataclass(frozen=True)
class Block:
    """Coordinates that belong together: one copy of a pair.

    ``g`` and ``h`` give, for each family on that side, features[row][coordinate] (or [row][frequency][2] where
    ``turned``).
    """

    heads: tuple[int, ...]
    turned: bool
    g: tuple[tuple[int, tuple[tuple[object, ...], ...]], ...]
    h: tuple[tuple[int, tuple[tuple[object, ...], ...]], ...]

    @property
    def size(self) -> int:
        """Number of coordinates (or frequencies)."""
        return len(self.g[0][1][0])


Edges = dict[tuple[Node, Node], float]

Side = tuple[tuple[int, tuple[tuple[object, ...], ...]], ...]
"""For each family on one side of a block, features[row][coordinate] (or [row][frequency][2])."""


@dataclass(frozen=True)
class Couplings:
    """Which features of a form act on which: for each head (second factor's, first factor's) -> derivative."""

    heads: tuple[Edges, ...]
    h_side: frozenset[Node]
    reason: str = ""
    members: tuple[frozenset[Node], ...] = ()
    """All features of linear maps that each head depends on, whether or not they were taken apart."""

    @property
    def nodes(self) -> set[Node]:
        """All features that take part."""
        return {n for own in self.heads for pair in own for n in pair}.union(*self.members)


@dataclass(frozen=True)
class Analysis:
    """What bilinear forms are made of, or why they are none."""

    blocks: tuple[Block, ...]
    heads: int
    reason: str = ""


MAX_HEADS = 4096
MAX_SLOTS = 4096
MAX_ROUNDS = 3
MAX_PARTNERS = 4
"""Features of one map that one feature may meet in a head: one, or two that are turned; more hang together."""


def couplings(form: Tensor, ports: Sequence[Port], seeds: Sequence[Tensor], seed: int = 0) -> Couplings:
    """Takes a form apart into heads and finds which features meet in each.

    Args:
        form: scalars (lead axes), one of which (or several) are a head's; with a graph to the ports.
        ports: what it may depend on.
        seeds: for each port which features are of the second factor (H side).
        seed: of the random weights.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = (torch.rand(form.shape, generator=generator) + 0.5).to(form)
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
    reason = _couple(ports, first, seeds, heads, edges)
    done = set(h_side)
    for _ in range(MAX_ROUNDS):
        # What a key meets may meet more than keys: a table of relative positions, say.
        met = {n for own in edges for pair in own for n in pair}
        missing = any(
            bool((own[i] & ~_among(p, met)).any()) for own in heads for i, p in enumerate(ports) if first[i] is not None
        )
        by_itself = any(p.axis is None and p.family in {f for f, _ in met} for p in ports)
        if reason or not (missing or by_itself) or met <= done:
            break
        reason = _couple(ports, first, [_among(p, met - done) for p in ports], heads, edges)
        done |= met
    _drop_common(ports, edges, h_side)
    # What is only added to the form, a bias that a map computes, is no feature of a head.
    kinds = {n[0] for own in edges for pair in own for n in pair}
    meeting = [i for i, p in enumerate(ports) if p.axis is not None and p.family in kinds]
    nodes = [frozenset(_nodes([ports[i] for i in meeting], [own[i] for i in meeting])) for own in heads]
    return Couplings(tuple(edges), h_side, reason, tuple(nodes))


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
    edges: Sequence[Edges],
) -> str:  # fmt: skip
    """Adds what the seeds meet to the edges of each head; returns why it could not be told, if so."""
    # Features that no head shares can be looked at together.
    slots = _slots(ports, seeds, heads)
    if len(slots) > MAX_SLOTS:
        return f"{len(slots)} coordinates are more than can be told apart"
    tensors = [p.tensor for p in ports]
    for slot in slots:
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
            for port, partners in met:
                for partner in partners[: 1 if most > MAX_PARTNERS else None]:
                    other = (port.family, port.first + partner)
                    if (other, node) not in found:
                        found[node, other] = float(sums[ports.index(port)][partner])
            if most > MAX_PARTNERS:
                return f"{most} features act as one (a norm or a mixing of coordinates)"
    return ""


def analyse(forms: Sequence[Couplings], families: Families) -> Analysis:
    """Coordinates and blocks of forms that have features in common (all the forms of a shared module, say)."""

    def mapped(family: int) -> bool:
        return bool(families.members[family].across)

    reasons = [f.reason for f in forms if f.reason]
    edges = [own for f in forms for own in f.heads]
    if reasons:
        return Analysis((), len(edges), reasons[0])
    return _blocks(edges, set().union(*(f.h_side for f in forms)), mapped)


def _head_masks(form: Tensor, ports: Sequence[Port], weights: Tensor, first: Sequence[Tensor | None]) -> list[Tensor]:
    """One weighting of the form for each combination of indices that may be a head."""
    everything = [p.features(g) for p, g in zip(ports, first, strict=True)]
    carrying = []
    for axis, size in enumerate(form.shape):
        if size == 1:
            continue
        mask = torch.zeros_like(weights)
        mask.select(axis, 0).copy_(weights.select(axis, 0))
        part = torch.autograd.grad(form, [p.tensor for p in ports], mask, retain_graph=True, allow_unused=True)
        features = [p.features(g) for p, g in zip(ports, part, strict=True)]
        if any(int(a.sum()) < int(b.sum()) for a, b in zip(features, everything, strict=True)):
            carrying.append(axis)
    if not carrying:
        return [weights]
    masks = []
    sizes = [form.shape[a] for a in carrying]
    total = 1
    for n in sizes:
        total *= n
    for k in range(min(total, MAX_HEADS + 1)):
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
    for mask in masks:
        part = torch.autograd.grad(form, [p.tensor for p in ports], mask, retain_graph=True, allow_unused=True)
        features = [p.features(g).cpu() for p, g in zip(ports, part, strict=True)]
        key = b"".join(f.numpy().tobytes() for f in features)
        if key not in seen:
            seen.add(key)
            out.append(features)
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


def in_order(forms: Sequence[Couplings], families: Families, pairing: str = "") -> list[Block]:
    """Blocks of forms whose coordinates act on each other, by the order of the features alone.

    The k-th feature of a head on the one side is taken to meet the k-th on the other. With ``pairing`` "half" or
    "interleaved" two of them are one frequency of a rotary embedding. Whether it is so is for a twin to tell; nothing
    is returned where the sides do not match.
    """
    h_side = set().union(*(f.h_side for f in forms))
    copies: dict[tuple[Node, ...], list[tuple[int, tuple[Node, ...]]]] = {}
    shared = True
    for index, own in enumerate(x for f in forms for x in f.members):
        nodes = sorted(n for n in own if families.members[n[0]].across)
        sides = tuple(n for n in nodes if n not in h_side), tuple(n for n in nodes if n in h_side)
        if not sides[0] or len(sides[0]) != len(sides[1]) or any(len({f for f, _ in s}) != 1 for s in sides):
            return []
        copies.setdefault(sides[0], []).append((index, sides[1]))
    if len({h for members in copies.values() for _, h in members}) < sum(map(len, copies.values())):
        # Heads share the other side: queries of one key.
        shared = False
        copies = {}
        for index, own in enumerate(x for f in forms for x in f.members):
            nodes = sorted(n for n in own if families.members[n[0]].across)
            key = tuple(n for n in nodes if n in h_side)
            copies.setdefault(key, []).append((index, tuple(n for n in nodes if n not in h_side)))
    blocks = []
    for one, members in copies.items():
        many = tuple(dict.fromkeys(h for _, h in members))
        if pairing and len(one) % 2:
            return []
        single, several = _ordered([one], pairing), _ordered(many, pairing)
        g, h = (single, several) if shared else (several, single)
        blocks.append(Block(tuple(i for i, _ in members), bool(pairing), g, h))
    return blocks


def _ordered(rows: Sequence[tuple[Node, ...]], pairing: str) -> Side:
    """(family, features[row][coordinate]) of each family, or [row][frequency][2] with a pairing."""
    out: dict[int, list[tuple[object, ...]]] = {}
    for nodes in rows:
        features = [i for _, i in nodes]
        half = len(features) // 2
        if pairing == "half":
            made: tuple[object, ...] = tuple((features[k], features[k + half]) for k in range(half))
        elif pairing:
            made = tuple((features[2 * k], features[2 * k + 1]) for k in range(half))
        else:
            made = tuple(features)
        out.setdefault(nodes[0][0], []).append(made)
    return tuple((family, tuple(table)) for family, table in sorted(out.items()))


# ------------------------------------------------------------------------------------------------------- coordinates


def _blocks(edges: Sequence[Edges], h_side: set[Node], mapped: Callable[[int], bool]) -> Analysis:
    """Coordinates are what hangs together; blocks are coordinates of the same heads."""
    heads = len(edges)
    root: dict[Node, Node] = {}

    def find(x: Node) -> Node:
        root.setdefault(x, x)
        while root[x] != x:
            root[x] = root[root[x]]
            x = root[x]
        return x

    for own in edges:
        for a, b in own:
            root[find(a)] = find(b)
    components: dict[Node, set[Node]] = {}
    for node in list(root):
        components.setdefault(find(node), set()).add(node)
    side = _sides(components, edges, h_side)
    if side is None:
        return Analysis((), heads, "features of one side act on each other (a norm, or more than a product)")
    met: dict[Node, dict[int, tuple[set[Node], set[Node]]]] = {}
    for h, own in enumerate(edges):
        for pair in own:
            both = met.setdefault(find(pair[0]), {}).setdefault(h, (set(), set()))
            for node in pair:
                both[side[node]].add(node)
    groups: dict[tuple[frozenset[int], bool, object], list[tuple[Node, set[Node]]]] = {}
    for key, nodes in components.items():
        # How many features of one family a head has in a coordinate: one, or two that are turned.
        counts = {n for both in met[key].values() for one in both for f, n in _families(one).items() if mapped(f)}
        if counts == {1}:
            turned = False
        elif counts == {2}:
            turned = True
        else:
            return Analysis(
                (), heads, f"{max(counts, default=0)} features act as one (a norm or a mixing of coordinates)"
            )
        families = tuple(sorted((f, s, n) for (f, s), n in _counted(nodes, side).items()))
        groups.setdefault((frozenset(met[key]), turned, families), []).append((key, nodes))
    blocks = []
    for (own_heads, turned, _), found in groups.items():
        found.sort(key=lambda item: min(n for n in item[1] if side[n]))
        made = (_turned if turned else _plain)(found, side, edges, own_heads)
        if made is None:
            return Analysis((), heads, "pairs of coordinates are not turned by rotations")
        blocks.append(Block(tuple(sorted(own_heads)), turned, made[0], made[1]))
    blocks.sort(key=lambda b: (b.turned, b.heads, b.h[0]))
    return Analysis(tuple(blocks), heads)


def _families(nodes: set[Node]) -> dict[int, int]:
    out: dict[int, int] = {}
    for family, _ in nodes:
        out[family] = out.get(family, 0) + 1
    return out


def _sides(components: dict[Node, set[Node]], edges: Sequence[Edges], h_side: set[Node]) -> dict[Node, bool] | None:
    """Node -> whether it is on the H side; None if a node would be on both."""
    side = dict.fromkeys(h_side, True)
    pairs = [pair for own in edges for pair in own]
    for _ in range(4):
        changed = False
        for a, b in pairs:
            for x, y in ((a, b), (b, a)):
                if x in side:
                    if side.get(y, not side[x]) == side[x]:
                        return None
                    if y not in side:
                        side[y] = not side[x]
                        changed = True
        if not changed:
            break
    return side if all(n in side for nodes in components.values() for n in nodes) else None


def _counted(nodes: set[Node], side: dict[Node, bool]) -> dict[tuple[int, bool], int]:
    out: dict[tuple[int, bool], int] = {}
    for n in nodes:
        out[n[0], side[n]] = out.get((n[0], side[n]), 0) + 1
    return out


def _plain(
    found: Sequence[tuple[Node, set[Node]]], side: dict[Node, bool], edges: object, heads: object
) -> tuple[Side, Side]:
    """features[row][coordinate] of each family, rows in the order of the features."""
    sides: list[Side] = []
    for wanted in (False, True):
        families = sorted({n[0] for _, nodes in found for n in nodes if side[n] is wanted})
        table = []
        for family in families:
            columns = [sorted(n[1] for n in nodes if n[0] == family and side[n] is wanted) for _, nodes in found]
            table.append((family, tuple(tuple(c[r] for c in columns) for r in range(len(columns[0])))))
        sides.append(tuple(table))
    return sides[0], sides[1]


def _turned(
    found: Sequence[tuple[Node, set[Node]]],
    side: dict[Node, bool],
    edges: Sequence[Edges],
    heads: frozenset[int],
) -> tuple[Side, Side] | None:
    """features[row][frequency][2]: the two features of a frequency so that both sides turn the same way."""
    g_rows: dict[int, list[list[tuple[int, int]]]] = {}
    h_rows: dict[int, list[list[tuple[int, int]]]] = {}
    for column, (_, nodes) in enumerate(found):
        for h in sorted(heads):
            own = {pair: v for pair, v in edges[h].items() if pair[0] in nodes}
            own |= {(b, a): v for (a, b), v in own.items()}
            both: tuple[dict[int, list[Node]], dict[int, list[Node]]] = ({}, {})
            for node in sorted({n for pair in own for n in pair}):
                both[side[node]].setdefault(node[0], []).append(node)
            if any(len(own_nodes) != 2 for one in both for own_nodes in one.values()):
                return None
            # The keys' first family sets the direction for the queries', and those for all others.
            first_h = next(iter(both[1].values()))
            ordered: dict[int, list[Node]] = {}
            for family, pair in both[0].items():
                order = _orientation([[own.get((b, a), 0.0) for b in first_h] for a in pair])
                if order is None:
                    return None
                ordered[family] = pair if order else pair[::-1]
                _append(g_rows, family, len(found), column, ordered[family])
            first_g = next(iter(ordered.values()))
            for family, pair in both[1].items():
                order = _orientation([[own.get((b, a), 0.0) for a in first_g] for b in pair])
                if order is None:
                    return None
                _append(h_rows, family, len(found), column, pair if order else pair[::-1])
    out = []
    for rows in (g_rows, h_rows):
        table = []
        for family, per_frequency in sorted(rows.items()):
            unique = [list(dict.fromkeys(column)) for column in per_frequency]
            if len({len(c) for c in unique}) != 1 or len(unique) != len(found):
                return None
            unique = [sorted(c) for c in unique]
            table.append((family, tuple(tuple(c[r] for c in unique) for r in range(len(unique[0])))))
        out.append(tuple(table))
    return out[0], out[1]


def _append(
    rows: dict[int, list[list[tuple[int, int]]]], family: int, count: int, column: int, pair: Sequence[Node]
) -> None:
    rows.setdefault(family, [[] for _ in range(count)])[column].append((pair[0][1], pair[1][1]))


def _orientation(m: list[list[float]]) -> bool | None:
    """Whether m is c + s J as it stands (True) or with its rows exchanged (False); None if neither."""
    (p, q), (r, s) = m
    size = max(abs(x) for x in (p, q, r, s))
    near = 1e-3 * size
    if abs(p - s) <= near and abs(q + r) <= near:
        return True
    if abs(r - q) <= near and abs(s + p) <= near:
        return False
    return None


# ------------------------------------------------------------------------------------------------------------- views


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


def features_view(
    families: Families, place: tuple[int, int], features: Sequence[int], apart: bool
) -> list[View] | None:
    """Views of some features of a linear map: copies of one coordinate each (``apart``), or one copy of all."""
    family, first = place
    table = torch.tensor(features) + first
    return _views(families.members[family], table.view(-1, 1, 1) if apart else table.view(1, 1, -1), False)


def entries_view(families: Families, family: int, table: Tensor) -> list[View] | None:
    """Views of a parameter's entries, (copies, rows, 1)."""
    return _views(families.members[family], table, False)


def _views(family: Family, table: Tensor, turned: bool) -> list[View] | None:
    """The view of a family's features, and that of their biases if they have some."""
    names = ("n", "m", "f", "c") if turned else ("n", "m", "h")
    field = "c" if turned else ""
    axes: list[Axis] = []
    start, rest = list(family.start), table
    for d in family.dimensions:
        inner = 1
        for later in family.dimensions[family.dimensions.index(d) + 1 :]:
            inner *= family.shape[later]
        index, rest = rest // inner, rest % inner
        found = _regular(index, names, d)
        if found is None:
            return None
        start[d] = int(index.flatten()[0])
        axes += [a for a in found if a.size > 1 and a.step]
    complete = _complete(axes, names, table, family.dimensions[0])
    if complete is None:
        return None
    axes = complete if family.across else [_whole(a, family, start, complete) for a in complete]
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
        total = 1
        for k, a in enumerate(own):
            out.append(Axis(f"{name}{k or ''}", a.size, a.dimension, a.step))
            total *= a.size
        if total != size:
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


# ----------------------------------------------------------------------------------------------------- forms of a trace


@dataclass(eq=False)
class Attention:
    """One softmax that compares, and the linear map that first reads what it mixed.

    Attributes:
        scope: the innermost module in which all of it happens.
        qk, vo: what meets in the logits, and in what is read.
        entries: parameters that enter the logits by themselves.
    """

    softmax: Softmax
    output: Linear | None
    scope: str
    qk: Couplings
    vo: Couplings
    entries: tuple[str, ...]


def attentions(trace: Trace, families: Families) -> Iterator[Attention]:
    """Every softmax whose logits compare one thing with another, or that mixes and has logits of unknown origin."""
    for softmax in trace.softmaxes:
        sources = trace.sources(softmax.logits)
        ports = list(_ports(trace, families, sources))
        roles = _key_features(softmax.logits, ports)
        if roles is not None:
            qk = couplings(contracted(softmax.logits), ports, roles)
        elif reason := _unseen(trace, families, softmax, ports):
            qk = Couplings((), frozenset(), reason)
        else:
            continue
        output = _output(trace, softmax)
        vo = Couplings((), frozenset(), "no linear map reads what attention mixes")
        used = [linear for linear in trace.linears if any(linear.leaf is s for s in sources)]
        if output is not None:
            vo = _values(trace, families, softmax, output)
            read = trace.sources(output.source)
            used += [x for x in trace.linears if any(x.leaf is s for s in read)] + [output]
        scope = common([x.scope for x in used] + [softmax.scope])
        yield Attention(softmax, output, scope, qk, vo, tuple(_others(trace, sources)))


def _unseen(trace: Trace, families: Families, softmax: Softmax, ports: Sequence[Port]) -> str:
    """Why what a softmax that mixes compares cannot be told; "" where it compares nothing (a pooling, a router)."""
    if id(softmax) not in trace.mixing:
        return ""
    mapped = [p for p in ports if p.axis is not None]
    if not mapped:
        return "no linear map of a parameter is seen in what it compares"
    for linear in trace.linears:
        if any(linear.leaf is p.tensor for p in mapped):
            below = list(_ports(trace, families, trace.sources(linear.source)))
            if _key_features(linear.source, below) is not None:
                return "its logits are mixed by a linear map after the comparison"
    return ""


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


def _key_features(logits: Tensor, ports: Sequence[Port]) -> list[Tensor] | None:
    """For each port the features that belong to keys; None if nothing is compared here.

    A query's features act on its own row of logits alone, a key's on its own column.
    """
    if logits.ndim < 3 or logits.shape[-1] < 2:
        return None
    tensors = [p.tensor for p in ports]
    if not tensors:
        return None
    generator = torch.Generator().manual_seed(1)
    noise = (torch.rand(logits.shape, generator=generator) + 0.5).to(logits)
    counts = []
    for axis, index in ((-2, logits.shape[-2] - 1), (-1, 0)):
        mask = torch.zeros_like(noise)
        mask.select(axis, index).copy_(noise.select(axis, index))
        grads = torch.autograd.grad(logits, tensors, mask, retain_graph=True, allow_unused=True)
        counts.append([_positions(p, g) for p, g in zip(ports, grads, strict=True)])
    # Of the classes of a router each is a key of its own: what the first key reads no other does.
    keys = [(a > b) & (b > 0) for a, b in zip(*counts, strict=True)]
    queries = [(a > 0) & ~(a > b) for a, b in zip(*counts, strict=True)]
    keys = [k if p.axis is not None else torch.zeros_like(k) for k, p in zip(keys, ports, strict=True)]
    return keys if any(bool(k.any()) for k in keys) and any(bool(q.any()) for q in queries) else None


def _positions(port: Port, gradient: Tensor | None) -> Tensor:
    """At how many positions each feature has a derivative, (features,)."""
    if gradient is None or port.axis is None:
        return torch.zeros(port.count)
    return (gradient != 0).movedim(port.axis, -1).flatten(0, -2).sum(0).float().cpu()


def _output(trace: Trace, softmax: Softmax) -> Linear | None:
    """The first linear map that reads something made of the softmax."""
    start = trace.order.index(softmax)
    for event in trace.order[start:]:
        if isinstance(event, Linear) and any(s is softmax.leaf for s in trace.sources(event.source)):
            return event
    return None


def _values(trace: Trace, families: Families, softmax: Softmax, output: Linear) -> Couplings:
    """Values and the columns of the output projection: the derivative in the attention weights is bilinear."""
    place = families.inputs(output)
    if place is None:
        return Couplings((), frozenset(), "the output projection does not read every input")
    x = output.source
    columns = torch.ones_like(x).requires_grad_()
    with torch.enable_grad():
        (by_weight,) = torch.autograd.grad(x, softmax.leaf, columns, create_graph=True)
    if not by_weight.requires_grad:
        return Couplings((), frozenset(), "values do not come from a linear map")
    sources = [s for s in trace.sources(by_weight) if s is not columns and s is not softmax.leaf]
    ports = [*_ports(trace, families, sources), Port(columns, output.source_axis, *place)]
    seeds = [torch.zeros(p.count, dtype=torch.bool) for p in ports]
    seeds[-1] = torch.ones(ports[-1].count, dtype=torch.bool)
    return couplings(contracted(by_weight), ports, seeds)


def contracted(x: Tensor) -> Tensor:
    """Queries and keys summed with random weights: one scalar for each index of the other axes."""
    generator = torch.Generator().manual_seed(2)
    weights = (torch.rand(x.shape[-2:], generator=generator) + 0.5).to(x)
    return (x * weights).sum((-2, -1))
