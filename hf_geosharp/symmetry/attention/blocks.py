"""Features that meet, put into coordinates and blocks: what one group element acts on together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hf_geosharp.symmetry.attention.couplings import Couplings, Edges, single
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.tracing.features import Families, Node

Side = tuple[tuple[int, tuple[tuple[object, ...], ...]], ...]
"""For each family on one side of a block, features[row][coordinate] (or [row][frequency][2] where it is turned)."""


@dataclass(frozen=True)
class Block:
    """Coordinates that belong together: one copy of a pair, with both its sides."""

    heads: tuple[int, ...]
    turned: bool
    g: Side
    h: Side

    @property
    def size(self) -> int:
        """Number of coordinates (or frequencies)."""
        return len(self.g[0][1][0])


@dataclass(frozen=True)
class Analysis:
    """What bilinear forms are made of, and why there is nothing, or no more than that, if so."""

    blocks: tuple[Block, ...]
    reason: str = ""


def analyse(forms: Sequence[Couplings], families: Families) -> Analysis:
    """Coordinates and blocks of forms that have features in common (all the forms of a shared module, say)."""

    def mapped(family: int) -> bool:
        return bool(families.members[family].across)

    reasons = [f.reason for f in forms if f.reason]
    edges = [own for f in forms for own in f.heads]
    if reasons:
        return Analysis((), reasons[0])
    h_side = set().union(*(f.h_side for f in forms))
    partly = next((f.partly for f in forms if f.partly), "")
    found = _blocks(edges, h_side, mapped)
    alone = single({n for pair in own for n in pair} for own in edges)
    if found.reason and alone:
        less = _blocks(
            [{p: v for p, v in own.items() if not alone & {f for f, _ in p}} for own in edges], h_side, mapped
        )
        found = found if less.reason else less
    return replace(found, reason=found.reason or partly)


def in_order(forms: Sequence[Couplings], families: Families, pairing: str = "") -> list[Block]:
    """Blocks of forms whose coordinates act on each other, by the order of the features alone.

    The k-th feature of a head on the one side is taken to meet the k-th on the other, of each family: those of texts
    and those of images, say. With ``pairing`` "half" or "interleaved" two of them are one frequency of a rotary
    embedding. Whether it is so is for a twin to tell; nothing is returned where the sides do not match.
    """
    h_side = set().union(*(f.h_side for f in forms))
    heads: dict[tuple[tuple[Node, ...], tuple[Node, ...]], int] = {}
    parts: dict[tuple[Node, ...], tuple[int, set[Node]]] = {}
    for index, own in enumerate(x for f in forms for x in f.members):
        nodes = sorted(n for n in own if families.members[n[0]].across)
        g, h = (tuple(n for n in nodes if (n in h_side) is side) for side in (False, True))
        if len(_sizes(g) | _sizes(h)) == 1:
            # A module that is called twice has the same heads each time.
            heads.setdefault((g, h), index)
        else:
            # What several softmaxes mix, a part each, is one head where it is normalised as one.
            parts.setdefault(h, (index, set()))[1].update(g)
    heads |= {(tuple(sorted(g)), h): index for h, (index, g) in parts.items()}
    if any(not g or not h or len(_sizes(g) | _sizes(h)) != 1 for g, h in heads):
        return []
    # Heads may share the other side: queries of one key do.
    shared = len({h for _, h in heads}) == len(heads)
    copies: dict[tuple[Node, ...], list[tuple[int, tuple[Node, ...]]]] = {}
    for (g, h), index in heads.items():
        one, other = (g, h) if shared else (h, g)
        copies.setdefault(one, []).append((index, other))
    blocks = []
    for one, members in copies.items():
        many = tuple(dict.fromkeys(h for _, h in members))
        if pairing and any(n % 2 for n in _sizes(one)):
            return []
        first, second = _ordered([one], pairing), _ordered(many, pairing)
        if not shared:
            first, second = second, first
        blocks.append(Block(tuple(i for i, _ in members), bool(pairing), first, second))
    return blocks


def _sizes(nodes: Sequence[Node]) -> set[int]:
    """How many features of each family there are, each number once."""
    return set(Counter(family for family, _ in nodes).values())


def _ordered(rows: Sequence[tuple[Node, ...]], pairing: str) -> Side:
    """(family, features[row][coordinate]) of each family, or [row][frequency][2] with a pairing."""
    out: dict[int, list[tuple[object, ...]]] = {}
    for nodes in rows:
        for family in dict.fromkeys(f for f, _ in nodes):
            features = [i for f, i in nodes if f == family]
            half = len(features) // 2
            if pairing == "half":
                made: tuple[object, ...] = tuple((features[k], features[k + half]) for k in range(half))
            elif pairing:
                made = tuple((features[2 * k], features[2 * k + 1]) for k in range(half))
            else:
                made = tuple(features)
            out.setdefault(family, []).append(made)
    return tuple((family, tuple(table)) for family, table in sorted(out.items()))


def _blocks(edges: Sequence[Edges], h_side: set[Node], mapped: Callable[[int], bool]) -> Analysis:
    """Coordinates are what hangs together; blocks are coordinates of the same heads."""
    partition: Partition[Node] = Partition()
    for own in edges:
        for a, b in own:
            partition.join(a, b)
    components = {key: set(nodes) for key, nodes in partition.groups().items()}
    pairs: dict[Node, list[tuple[Node, Node]]] = {}
    for own in edges:
        for pair in own:
            pairs.setdefault(partition.group(pair[0]), []).append(pair)
    met: dict[Node, dict[int, tuple[set[Node], set[Node]]]] = {}
    side: dict[Node, bool] = {}
    reason = ""
    for key, nodes in list(components.items()):
        sides = _sides(nodes, pairs[key], h_side)
        if sides is None:
            reason = reason or "features of one side act on each other (a norm, or more than a product)"
            del components[key]
        else:
            side |= sides
    for h, own in enumerate(edges):
        for pair in own:
            if partition.group(pair[0]) in components:
                both = met.setdefault(partition.group(pair[0]), {}).setdefault(h, (set(), set()))
                for node in pair:
                    both[side[node]].add(node)
    groups: dict[tuple[frozenset[int], bool, object], list[tuple[Node, set[Node]]]] = {}
    for key, nodes in components.items():
        # How many features of one family a head has in a coordinate: one, or two that are turned.
        halves = [one for both in met[key].values() for one in both]
        counts = {n for one in halves for n in Counter(f for f, _ in one if mapped(f)).values()}
        if counts not in ({1}, {2}):
            most = max(counts, default=0)
            reason = reason or f"{most} features act as one (a norm or a mixing of coordinates)"
            continue
        families = tuple(sorted((f, s, n) for (f, s), n in Counter((node[0], side[node]) for node in nodes).items()))
        groups.setdefault((frozenset(met[key]), counts == {2}, families), []).append((key, nodes))
    blocks = []
    for (own_heads, turned, _), found in groups.items():
        found.sort(key=lambda item: min(n for n in item[1] if side[n]))
        made = _turned(found, side, edges, own_heads) if turned else _plain(found, side)
        if made is None:
            reason = reason or "pairs of coordinates are not turned by rotations"
        else:
            blocks.append(Block(tuple(sorted(own_heads)), turned, made[0], made[1]))
    blocks.sort(key=lambda b: (b.turned, b.heads, b.h[0]))
    return Analysis(tuple(blocks), reason)


def _sides(nodes: set[Node], pairs: Sequence[tuple[Node, Node]], h_side: set[Node]) -> dict[Node, bool] | None:
    """Node of a component -> whether it is on the H side; None if one would be on both."""
    seeds = nodes & h_side
    # The keys of one softmax may be the queries of another one. Which side is called H does not matter.
    return _parted(nodes, pairs, seeds) or _parted(nodes, pairs, {min(seeds)} if seeds else set())


def _parted(nodes: set[Node], pairs: Sequence[tuple[Node, Node]], seeds: set[Node]) -> dict[Node, bool] | None:
    """Two sides, of which that of the seeds is True, so that every pair has one of each; None if there are none."""
    side = dict.fromkeys(seeds, True)
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
    return side if len(side) == len(nodes) else None


def _plain(found: Sequence[tuple[Node, set[Node]]], side: dict[Node, bool]) -> tuple[Side, Side]:
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
