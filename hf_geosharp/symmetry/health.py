"""Gauge health: what the weights alone say about each head, without data.

A head is its pair (G, H), or the pairs that act side by side in it (the frequencies of a rotary head, and its unrotated
rest). Norm gains and biases that fold are folded first, in copies, so that the product G Hᴴ is the one the function
sees. Its singular values and its rank are then the same wherever on its orbit a model is; condition and balance say
where on the orbit it is: in the canonical gauge (:mod:`hf_geosharp.geometry.gauge`) the balance is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn

from hf_geosharp.geometry.gauge import CUTOFF
from hf_geosharp.symmetry.fold import Fold
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import wide_copy

KINDS = frozenset({"qk", "vo", "lora"})
"""Kinds of pairs that are measured: those whose copies are heads, and adapters, which count as one head."""

HEADS = "n"
"""Name of the axes of a pair's copies that count heads (n, n1, ...); others count what lies side by side in a head."""

DEAD = 1e-4
"""A head is dead when the norm of its product is at most this share of the median head's of its kind."""


@dataclass(frozen=True)
class HeadHealth:
    """One head of one kind: query/key, value/output, or an adapter, which counts as one head.

    Attributes:
        site: the symmetry it belongs to.
        module, kind, head: where; with grouped queries a head is a key/value head with all its query heads.
        dim: real columns of its factors.
        rank: how many of them its product really has.
        condition_g, condition_h: largest over smallest singular value of each factor; None for a rank-deficient one.
        balance: ‖G‖² + ‖H‖² over its minimum on the orbit, 1 at best; None for a product of zero.
        singular_values: of the product, descending; one of a complex column stands for two of ``dim``.
        flags: "dead" (a negligible product) or "rank-deficient".
    """

    site: str
    module: str
    kind: str
    head: int
    dim: int
    rank: int
    condition_g: float | None
    condition_h: float | None
    balance: float | None
    singular_values: tuple[float, ...]
    flags: tuple[str, ...] = ()

    @property
    def condition(self) -> float | None:
        """That of the worse factor."""
        both = (self.condition_g, self.condition_h)
        return None if None in both else max(c for c in both if c is not None)

    @property
    def norm(self) -> float:
        """The size of the product: the root of the sum of the squares of its singular values."""
        return math.hypot(*self.singular_values)


def health(model: nn.Module, symmetries: SymmetryMap, *, cutoff: float = CUTOFF) -> tuple[HeadHealth, ...]:
    """The health of every head of a map, computed in float64 on copies of the weights; the model is only read.

    Args:
        model: the model that the map was found on.
        symmetries: its map.
        cutoff: the share of the largest singular value below which a direction does not count; by default that of
            scores.
    """
    found = [
        head
        for pairs, folds in _neighbourhoods(symmetries)
        for head in _heads_of(pairs, _canonical_weights(model, pairs, folds), cutoff)
    ]
    order = {pair.name: place for place, pair in enumerate(symmetries.pairs)}
    found.sort(key=lambda head: (order[head.site], head.head))
    return tuple(_flagged(found))


def _neighbourhoods(symmetries: SymmetryMap) -> Iterator[tuple[tuple[Pair, ...], tuple[Fold, ...]]]:
    """Pairs, as the folds leave them, with all folds that reach their weights: one layer or so at a time."""
    waiting = {pair.name: pair for pair in symmetries.pairs if pair.kind in KINDS}
    while waiting:
        pairs = [waiting.pop(next(iter(waiting)))]
        parameters, folds = set(pairs[0].parameters), list[Fold]()
        grown = True
        while grown:
            near = [f for f in symmetries.folds if f not in folds and parameters & set(f.parameters)]
            also = [p for p in waiting.values() if parameters & set(p.parameters)]
            folds += near
            pairs += [waiting.pop(p.name) for p in also]
            parameters.update(n for s in (*near, *also) for n in s.parameters)
            grown = bool(near or also)
        order = [f for f in symmetries.folds if f in folds]
        yield tuple(symmetries.coordinates(p) for p in pairs), tuple(order)


def _canonical_weights(model: nn.Module, pairs: Sequence[Pair], folds: Sequence[Fold]) -> dict[str, Tensor]:
    """Wide copies of the weights of the pairs, folded."""
    weights = wide_copy(model, {n: None for s in (*pairs, *folds) for n in s.parameters})
    for fold in folds:
        fold.canonicalise(weights)
    return weights


@dataclass(frozen=True)
class _Part:
    """What one pair contributes to its heads: its factors, (heads, blocks, N, d)."""

    pair: Pair
    g: Tensor
    h: Tensor

    @property
    def heads(self) -> int:
        return self.g.shape[0]

    @property
    def squares(self) -> Tensor:
        """(heads,) ‖G‖² + ‖H‖²."""
        return _sum([(x.abs() ** 2).sum((1, 2, 3)) for x in (self.g, self.h)])

    def least(self, core: Tensor) -> Tensor:
        """(heads,) the least ‖G‖² + ‖H‖² on the orbit: twice the sum of the singular values, if lengths can change."""
        return self.squares if self.pair.group.isometric else 2 * core.sum(1)

    def core(self) -> Tensor:
        """(heads, blocks * d) singular values of the products G Hᴴ."""
        return _core(_triangle(self.g), _triangle(self.h))

    @property
    def real(self) -> int:
        """Real columns that one singular value stands for."""
        return 2 if self.g.is_complex() else 1


def _heads_of(pairs: Sequence[Pair], weights: Mapping[str, Tensor], cutoff: float) -> Iterator[HeadHealth]:
    """A pair of rotary columns and one of the others are the same heads if they share their first parameter."""
    together: list[list[_Part]] = []
    for pair in pairs:
        part = _Part(pair, *(by_head(pair, x) for x in pair.factors(weights)))
        other = next((parts for parts in together if len(parts) == 1 and _completes(part, parts[0])), None)
        if other is None:
            together.append([part])
        else:
            other.append(part)
    for parts in together:
        yield from _measure(parts, cutoff)


def _completes(part: _Part, other: _Part) -> bool:
    pairs = (part.pair, other.pair)
    same = len({(p.module, p.kind, p.g[0].parameter) for p in pairs}) == 1 and part.heads == other.heads
    return same and {p.group.complex for p in pairs} == {True, False}


def by_head(pair: Pair, x: Tensor) -> Tensor:
    """(copies, ...) of a pair as (heads, copies of each, ...): a rotary head has several frequencies."""
    copies, sizes, rest = pair.g[0].copies, pair.g[0].sizes, x.shape[1:]
    counting = [place for place, name in enumerate(copies) if name.rstrip("0123456789") == HEADS]
    heads = math.prod(sizes[copies[place]] for place in counting)
    if copies:
        x = x.unflatten(0, [sizes[a] for a in copies]).movedim(counting, list(range(len(counting))))
    return x.reshape(heads, -1, *rest)


def _measure(parts: Sequence[_Part], cutoff: float) -> Iterator[HeadHealth]:
    cores = [p.core() for p in parts]
    s = torch.cat(cores, dim=1)
    columns = torch.cat([torch.full_like(c[0], p.real) for p, c in zip(parts, cores, strict=True)])
    kept = (s > cutoff * s.amax(1, keepdim=True)) & (s > torch.finfo(s.dtype).tiny)
    balance = _sum([p.squares for p in parts]) / _sum([p.least(c) for p, c in zip(parts, cores, strict=True)])
    rows = zip(
        (kept * columns).sum(1).tolist(),
        _condition([p.g for p in parts], cutoff),
        _condition([p.h for p in parts], cutoff),
        balance.tolist(),
        s.sort(dim=1, descending=True).values.tolist(),
        strict=True,
    )
    first = parts[0].pair
    for head, (rank, condition_g, condition_h, ratio, values) in enumerate(rows):
        yield HeadHealth(
            site=first.name,
            module=first.module,
            kind=first.kind,
            head=head,
            dim=int(columns.sum()),
            rank=int(rank),
            condition_g=condition_g,
            condition_h=condition_h,
            balance=ratio if rank else None,
            singular_values=tuple(values),
        )


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(terms)).sum(0)


def _triangle(x: Tensor) -> Tensor:
    """R of the thin QR of (..., N, d); for one column its norm."""
    if x.shape[-1] == 1:
        return torch.linalg.vector_norm(x, dim=-2, keepdim=True)
    return torch.linalg.qr(x, mode="r").R


def _core(r_g: Tensor, r_h: Tensor) -> Tensor:
    """(heads, blocks * d) singular values of G Hᴴ."""
    if r_g.shape[-1] == 1:
        return (r_g * r_h).flatten(1)
    s = torch.linalg.svdvals(r_g @ r_h.mH)
    # A factor with fewer rows than columns has fewer singular values; the others are zero.
    return nn.functional.pad(s, (0, r_g.shape[-1] - s.shape[-1])).flatten(1)


def _condition(factors: Sequence[Tensor], cutoff: float) -> list[float | None]:
    """Condition numbers of the heads' whole factors: real matrices with the columns of all blocks side by side."""
    height = max(x.shape[-2] for x in factors)
    columns = []
    for x in factors:
        wide = torch.view_as_real(x.resolve_conj()).flatten(-2) if x.is_complex() else x
        wide = wide.transpose(1, 2).flatten(2)
        # A bias that only a part of the head has left is a row that the other parts do not have.
        columns.append(nn.functional.pad(wide, (0, 0, 0, height - wide.shape[1])))
    s = torch.linalg.svdvals(torch.linalg.qr(torch.cat(columns, dim=2), mode="r").R)
    full = s.shape[1] == sum(x.shape[2] for x in columns)
    return [v[0] / v[-1] if full and v[-1] > cutoff * v[0] else None for v in s.tolist()]


def _flagged(heads: Sequence[HeadHealth]) -> Iterator[HeadHealth]:
    """Dead is relative: to the median head of the same kind in the whole model."""
    kinds = {head.kind for head in heads}
    typical = {kind: median(head.norm for head in heads if head.kind == kind) for kind in kinds}
    for head in heads:
        if head.norm <= DEAD * typical[head.kind]:
            yield replace(head, flags=("dead",))
        elif head.rank < head.dim:
            yield replace(head, flags=("rank-deficient",))
        else:
            yield head
