"""The map of all symmetries of a model: random elements, moving along the orbit and back."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import nn

from hf_geosharp.arguments import check, check_kind, fraction, whole
from hf_geosharp.errors import UsageError
from hf_geosharp.symmetry.base import Move, Symmetry, Weights
from hf_geosharp.symmetry.fold import Fold, Gain
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import put, wide_copy
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.views import View
from hf_geosharp.wrappers import check_module

_FIRST = ("qk", "vo", "lora", "qk_norm", "mlp")
"""Which of two pairs with entries in common stays a pair."""


_DRAWN_LAST = ("read_mean", "written_mean", "stream_bias")


def _overlap(first: Pair, second: Pair) -> bool:
    """Whether two pairs have an entry of a parameter in common."""
    return any(v.meets(other) for v in (*first.g, *first.h) for other in (*second.g, *second.h))


def parameters_of(symmetries: Iterable[Symmetry]) -> tuple[str, ...]:
    """Names of all parameters that some of them move, each once."""
    return tuple(dict.fromkeys(p for s in symmetries for p in s.parameters))


def connected(symmetries: Iterable[Symmetry]) -> list[list[Symmetry]]:
    """Groups that have no parameter in common, each in the order given: what one does the others do not see.

    Done one after the other, they need memory for the parameters of one of them only.
    """
    groups: list[tuple[set[str], list[tuple[int, Symmetry]]]] = []
    for place in enumerate(symmetries):
        names, members = set(place[1].parameters), [place]
        apart = []
        for other in groups:
            if other[0].isdisjoint(names):
                apart.append(other)
            else:
                names |= other[0]
                members += other[1]
        groups = [*apart, (names, members)]
    ordered = [sorted(members, key=lambda item: item[0]) for _, members in groups]
    return [[s for _, s in members] for members in sorted(ordered, key=lambda members: members[0][0])]


@dataclass(frozen=True)
class Element:
    """A group element of a whole model: one move for each symmetry, by name."""

    moves: Mapping[str, Move]


@dataclass(frozen=True)
class SymmetryMap:
    """The symmetries found on a model.

    Attributes:
        pairs: what the geometry works on.
        folds: what is moved to a fixed representative and left out (biases that cancel, norm gains), in the order
            in which it has to be done.
        scales: what the elementwise metric is invariant under as it is.
        dropped: claims that did not hold, as text (name: reason).
        unrecognised: modules that look like attention and were not understood, and what else there is to know.
        missed: those of them where a score may not be invariant: of the attention there nothing, or only a part, is
            claimed.
        limited: symmetries that end where activations are larger than on the example, as text (name: why).
    """

    pairs: tuple[Pair, ...] = ()
    folds: tuple[Fold, ...] = ()
    dropped: tuple[str, ...] = ()
    unrecognised: tuple[str, ...] = ()
    scales: tuple[Scale, ...] = ()
    missed: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()

    @property
    def symmetries(self) -> tuple[Symmetry, ...]:
        """Folds first: they change what the pairs are made of."""
        return (*self.folds, *self.pairs, *self.scales)

    @property
    def fixed(self) -> tuple[View, ...]:
        """What the folds set to a constant: neither coordinates nor perturbed."""
        return tuple(v for f in self.folds for v in f.fixed)

    def coordinates(self, pair: Pair) -> Pair:
        """The pair without the rows that a fold has taken away."""
        fixed = {v.region for v in self.fixed}
        g, h = (tuple(v for v in views if v.region not in fixed) for views in (pair.g, pair.h))
        return replace(pair, g=g, h=h)

    @property
    def dimension(self) -> int:
        """Real dimension of the whole group."""
        return sum(s.dimension for s in self.symmetries)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters that some symmetry moves."""
        return parameters_of(self.symmetries)

    @property
    def limits(self) -> str:
        """A sentence on the symmetries of the map that end where activations are larger; "" if there are none."""
        names = {s.name for s in self.symmetries}
        limited = [text for text in self.limited if text.partition(": ")[0] in names]
        if not limited:
            return ""
        return (
            f"{len(limited)} of the symmetries {'holds' if len(limited) == 1 else 'hold'} only while activations are "
            f"not much larger than on the example, below a clamp say ({limited[0]})"
        )

    def supported(self) -> SymmetryMap:
        """The map less the pairs with a gain between their factors that no fold takes away, which are recorded."""
        folded = {f.gain for f in self.folds if isinstance(f, Gain)}
        lost = [p for p in self.pairs if p.between is not None and p.between.gain not in folded]
        return replace(
            self,
            pairs=tuple(p for p in self.pairs if p not in lost),
            dropped=(
                *self.dropped,
                *(f"{p.name}: the gain of the norm between its factors is not folded" for p in lost),
            ),
        )

    def within(self, names: Container[str]) -> SymmetryMap:
        """The map less the symmetries that move other parameters than those named."""

        def own(symmetry: Symmetry) -> bool:
            return all(name in names for name in symmetry.parameters)

        return replace(
            self,
            pairs=tuple(filter(own, self.pairs)),
            folds=tuple(filter(own, self.folds)),
            scales=tuple(filter(own, self.scales)),
        ).supported()

    def without(self, reasons: Mapping[str, str]) -> SymmetryMap:
        """The map less the symmetries named, which are recorded as dropped."""
        return replace(
            self,
            pairs=tuple(p for p in self.pairs if p.name not in reasons),
            folds=tuple(f for f in self.folds if f.name not in reasons),
            scales=tuple(s for s in self.scales if s.name not in reasons),
            dropped=(*self.dropped, *(f"{name}: {reason}" for name, reason in reasons.items())),
        ).supported()

    def separated(self) -> tuple[SymmetryMap, tuple[str, ...]]:
        """The map with pairs that have no entry in common, and the names of those that a score is not invariant under.

        A matrix in the middle of a chain is in two pairs: the rows of one, the columns of the other. Where all groups
        of a chain are numbers, its pairs go: the elementwise metric is invariant under all of them. Elsewhere those of
        attention stay, and the others' invariance is lost.
        """
        # One matrix that is query and key at once is no pair of two.
        lost = [p.name for p in self.pairs if _overlap(replace(p, h=()), replace(p, g=()))]
        gone: set[str] = set(lost)
        chains = replace(self, pairs=tuple(p for p in self.pairs if p.name not in gone))._chains()
        for chain in chains:
            if all(p.group.dim == 1 and not p.group.complex for p in chain):
                gone |= {p.name for p in chain}
                continue
            taken: list[Pair] = []
            for pair in sorted(chain, key=lambda p: _FIRST.index(p.kind) if p.kind in _FIRST else len(_FIRST)):
                if any(_overlap(pair, other) for other in taken):
                    gone.add(pair.name)
                    lost.append(pair.name)
                else:
                    taken.append(pair)
        return replace(self, pairs=tuple(p for p in self.pairs if p.name not in gone)), tuple(lost)

    def _chains(self) -> list[list[Pair]]:
        """Pairs that hang together by entries they share, where there is more than one."""
        users: dict[str, list[tuple[Pair, View]]] = {}
        for pair in self.pairs:
            for view in (*pair.g, *pair.h):
                users.setdefault(view.parameter, []).append((pair, view))
        partition = Partition(pair.name for pair in self.pairs)
        for views in users.values():
            for (first, one), (second, other) in combinations(views, 2):
                if one.meets(other) and partition.group(first.name) != partition.group(second.name):
                    partition.join(second.name, first.name)
        named = {pair.name: pair for pair in self.pairs}
        return [[named[name] for name in names] for names in partition.groups().values() if len(names) > 1]

    def random_element(self, weights: Weights | nn.Module, seed: int = 0, condition: float = 10.0) -> Element:
        """A random element of the whole group, the same for the same seed.

        Raises:
            UsageError: the seed is no whole number, or the condition not positive and finite.
        """
        if not 0 < fraction("condition", condition) < math.inf:
            raise UsageError(f"condition is {condition}; it is positive and finite")
        generator = torch.Generator().manual_seed(whole("seed", seed))
        if isinstance(weights, nn.Module):
            weights = dict(weights.named_parameters())
        # What is drawn for the others is not another one where there are some.
        drawn = sorted(self.symmetries, key=lambda s: _DRAWN_LAST.index(s.kind) + 1 if s.kind in _DRAWN_LAST else 0)
        moves = {s.name: s.random(weights, generator, condition) for s in drawn}
        return Element({s.name: moves[s.name] for s in self.symmetries})

    def inverse(self, element: Element) -> Element:
        """The element that brings everything back (to rounding)."""
        check_kind("element", element, Element, "what random_element or inverse returns")
        return Element({s.name: s.inverse(element.moves[s.name]) for s in self.symmetries})

    def move(self, weights: Weights, element: Element) -> None:
        """Moves a mapping of weights along its orbit, in place."""
        for symmetry in self.symmetries:
            symmetry.apply(weights, element.moves[symmetry.name])

    def apply(self, model: nn.Module, element: Element, *, back: bool = False) -> None:
        """Moves a model along its orbit, in place: computed in float64, rounded once to the model's dtype.

        ``map.apply(model, map.inverse(element), back=True)`` undoes ``map.apply(model, element)``.
        """
        check_module(model, "load it first, as hf_geosharp.load_pretrained does")
        check_kind("element", element, Element, "what random_element or inverse returns")
        check(back=back)
        for members in connected(self.symmetries):
            weights = wide_copy(model, parameters_of(members))
            for symmetry in reversed(members) if back else members:
                symmetry.apply(weights, element.moves[symmetry.name])
            put(model, weights)
