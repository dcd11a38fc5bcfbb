"""The chart of a sharded model: each rank holds its part of the coordinates, and all take every step together.

What the elementwise metric is about stays where it is: a rank's coordinates are those of its own rows. Pairs need whole
matrices, so each site (what folds and pairs tie together: the attention of a layer, its MLP) is one rank's, which keeps
the matrices of its pairs whole, and their coordinates. Sites are spread evenly, so that a rank has about as much of the
ascent's state as of the model. With every pass their gradients come to it from the rows, and the new weights go back,
site by site: a rank sends and gets one site at a time.

Inner products are sums over the ranks, the same on all of them to the last bit, so that all take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hf_geosharp.geometry.integration import EndlessError
from hf_geosharp.geometry.metrics import Order
from hf_geosharp.geometry.space import Part, Space, Sum, Tangent, Vector
from hf_geosharp.parallel import World
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.chart import Chart, Geometry, Owned
from hf_geosharp.sharpness.loose import Loose, free_entries, is_small, views_by_parameter
from hf_geosharp.sharpness.shards import Shards
from hf_geosharp.sharpness.stacks import stacked
from hf_geosharp.symmetry.base import Symmetry
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import Leaf
from hf_geosharp.symmetry.partition import Partition
from hf_geosharp.symmetry.views import View, shape_of


@dataclass(frozen=True)
class Site:
    """Parameters that folds and pairs tie together, and the rank that does their geometry."""

    owner: int
    parameters: tuple[str, ...]


@dataclass(frozen=True)
class _Held(Leaf):
    """A whole parameter of a site, at its owner. ``gradients`` has those that came from the rows."""

    gradients: Mapping[str, Tensor]

    def gradient(self) -> Tensor:
        """The whole gradient."""
        return self.gradients[self.name]


@dataclass(frozen=True)
class _Draw:
    """A part of the whole space: how many coordinates it has, and which of them are here.

    ``here`` has (part, where in its piece, where in the whole part, how many).
    """

    numel: int
    here: tuple[tuple[int, int, int, int], ...]


class ShardedSpace(Space):
    """The rank's own parts of a space. All ranks have to make the same calls."""

    def __init__(
        self,
        parts: Sequence[Part],
        dtype: torch.dtype,
        device: torch.device,
        world: World,
        draws: Callable[[], list[_Draw]],
    ) -> None:
        super().__init__(parts, dtype, device)
        self._world, self._draws = world, draws

    @property
    def dimension(self) -> int:
        """Dimension of the whole horizontal space."""
        return round(self._world.sums([float(super().dimension)], self.device)[0])

    def sweep(self, sums: Sequence[Sum], products: Sequence[tuple[Vector, Vector]] = ()) -> list[float]:
        """The rank's part of the sums, and ⟨u, v⟩ of each pair of tangent vectors over all ranks."""
        here = super().sweep(sums, products)
        return self._world.sums(here, self.device) if products else here

    def random(self, generator: torch.Generator) -> Tangent:
        """A standard Gaussian tangent vector, horizontal: the rank's part of the one that a whole space draws."""
        u = self.empty()
        for draw in self._draws():
            noise = torch.randn(draw.numel, dtype=torch.float64, generator=generator)
            for part, to, start, count in draw.here:
                u.pieces[part][to : to + count] = noise[start : start + count].to(u.pieces[part])
        return self.horizontal_(u)


class ShardedChart(Chart):
    """A borrowed model that is sharded, in coordinates. All ranks have to make the same calls."""

    def __init__(
        self, borrowed: Borrowed, symmetries: SymmetryMap, geometry: Geometry, world: World, *, nudge: float = 0.0,
        seed: int = 0, ranks: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:  # fmt: skip
        """The model has to hold the borrowed originals, and nothing gathered. What moves it is as for a chart."""
        assert borrowed.shards is not None
        self._shards, self._world = borrowed.shards, world
        self._rows = borrowed.leaves
        if not geometry.paired:
            symmetries = SymmetryMap()
        self._all, _ = symmetries.separated()
        self._pairs = [self._all.coordinates(p) for p in self._all.pairs]
        kept = {name for p in self._pairs for name in p.parameters}
        self._kept = tuple(name for name in self._rows if name in kept)
        """Parameters of pairs: whole at their owners as long as the chart is there."""
        sites = sites_of(self._all, {name: leaf.shape.numel() for name, leaf in self._rows.items()}, world.size)
        self._traffic = _Traffic(self._shards, world, sites)
        self._gradients: dict[str, Tensor] = {}
        self._reach: dict[str, Tensor] = {}
        own = {name for site in sites if site.owner == world.rank for name in site.parameters}
        with torch.no_grad():
            whole = self._traffic.collect(lambda name: self._rows[name].tensor)
        leaves: dict[str, Leaf] = {}
        for name, leaf in self._rows.items():
            if name in own:
                leaves[name] = _Held(name, whole.pop(name), (), True, self._gradients)
            elif name not in kept:
                leaves[name] = leaf
        mine = replace(
            self._all,
            pairs=tuple(p for p in self._all.pairs if own.issuperset(p.parameters)),
            folds=tuple(f for f in self._all.folds if own.issuperset(f.parameters)),
            scales=(),
        )
        originals = {name: borrowed.originals[name] for name in leaves if name not in own}
        super().__init__(
            replace(borrowed, leaves=leaves, originals=originals), mine, geometry, nudge=nudge, seed=seed, ranks=ranks
        )
        found = [text for texts in world.gather(self.reduced) for text in texts]
        order = {pair.name: i for i, pair in enumerate(self._pairs)}
        self.reduced = sorted(found, key=lambda text: order[text.partition(":")[0]])

    # ------------------------------------------------------------------------------------------------ construction

    def _fold(self, symmetries: SymmetryMap) -> list[str]:
        super()._fold(symmetries)
        folded = tuple(dict.fromkeys(n for f in self._all.folds for n in f.parameters))
        # What is in no pair goes back to its rows.
        back = [name for name in folded if name not in self._kept]
        self._traffic.spread(self._tensors, lambda name: self._rows[name].tensor, back)
        leaves = self._borrowed.leaves
        assert isinstance(leaves, dict)
        for name in back:
            leaves[name] = self._rows[name]
            self._tensors[name] = self._rows[name].tensor
        return list(folded)

    def _loose_leaves(self, pairs: Sequence[Pair], fixed: Sequence[View]) -> list[Loose]:
        here = self._borrowed.leaves
        found = super()._loose_leaves(pairs, [v for v in self._all.fixed if v.parameter in here])
        return [item for item in found if item.leaf.tensor.numel()]

    def _space_of(self, parts: Sequence[Part]) -> Space:
        device = next(iter(self._rows.values())).tensor.device
        return ShardedSpace(parts, self._borrowed.dtype, device, self._world, self._draws)

    # ----------------------------------------------------------------------------------------------------- ownership

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        """As a chart's: those of the whole model, as far as they lie here."""
        return self._rows

    def owned(self) -> Iterator[Owned]:
        """As a chart's: what all coordinates of all ranks belong to."""
        here = {owned.name: owned for owned in super().owned()}
        for pair in (pair for stack in stacked(self._pairs) for pair in stack.pairs):
            yield here.get(pair.name, Owned(None, pair.name, pair))
        views = views_by_parameter(self._pairs, self._all.fixed)
        for name, leaf in self._rows.items():
            if leaf.shape.numel() and (name not in views or bool(free_entries(leaf, views[name]).any())):
                yield here.get(name, Owned(None, name))

    # -------------------------------------------------------------------------------------------------------- focus

    def widen(self) -> None:
        """As a chart's."""
        super().widen()
        self._reach = {}

    def focus(self, rows: Mapping[str, Tensor]) -> None:
        """As a chart's; the rows are those that any rank's samples reach."""
        self._reach = dict(rows)
        super().focus(rows)

    def _narrowed(self, found: Mapping[str, bool]) -> set[str]:
        every = self._world.gather(dict(found))
        names = {name for ranks in every for name in ranks}
        narrow = {name for name in names if all(ranks.get(name, True) for ranks in every)}
        self._reach = {name: rows for name, rows in self._reach.items() if name in narrow}
        return narrow

    # ---------------------------------------------------------------------------------------------------- transport

    @torch.no_grad()
    def write(self, u: Vector, order: Order | None = None) -> None:
        """As a chart's; the weights of pairs go to their rows."""
        failure: EndlessError | None = None
        try:
            super().write(u, order)
        except EndlessError as error:
            failure = error
        if "exact" in (order, self.geometry.geodesic):
            # Where it is integrated it may fail, on one rank alone.
            told = self._world.gather(None if failure is None else (failure.copies, failure.share, failure.where))
            # All ranks tell of the same one.
            failure = next((EndlessError(*found) for found in told if found is not None), None)
        if failure is not None:
            raise failure
        self._traffic.spread(self._tensors, lambda name: self._rows[name].tensor, self._kept)

    @torch.no_grad()
    def pull(self) -> Tangent:
        """As a chart's; the gradients of pairs come from their rows."""
        self._gradients.update(self._traffic.collect(lambda name: self._rows[name].gradient(), self._kept))
        for name in self._kept:
            for p, _ in self._rows[name].members:
                p.grad = None
        try:
            return super().pull()
        finally:
            self._gradients.clear()

    def _release(self, names: Iterable[str]) -> None:
        for name in names:
            self._gradients.pop(name, None)
        super()._release(names)

    def share(self, u: Tangent) -> dict[str, float]:
        """As a chart's, over all ranks."""
        every = self._world.gather(super().share(u))
        order = [p.name for b in stacked(self._pairs) for p in b.pairs]
        names = dict.fromkeys([*order, *self._rows])
        return {n: sum(s.get(n, 0.0) for s in every) for n in names if any(n in s for s in every)}

    # ------------------------------------------------------------------------------------------------- random draws

    def _draws(self) -> list[_Draw]:
        """The parts that the space of a whole model has, in its order."""
        return [*self._draws_of_pairs(), *self._draws_of_entries()]

    def _draws_of_pairs(self) -> Iterable[_Draw]:
        here = {
            pair.name: (i, stack, start)
            for i, stack in enumerate(self._stacks)
            for pair, start in zip(stack.pairs, stack.starts, strict=True)
        }
        for stack in stacked(self._pairs):
            total, own = 0, dict.fromkeys(here, 0)
            found: list[tuple[int, int, int, int]] = []
            for side in ("g", "h"):
                _, d, height = shape_of(getattr(stack.pairs[0], side))
                each = d * height * (2 if stack.pairs[0].group.complex else 1)
                for pair in stack.pairs:
                    if pair.name in here:
                        part, local, start = here[pair.name]
                        found.append((part, own[pair.name] + start * each, total, pair.copies * each))
                        own[pair.name] += sum(p.copies for p in local.pairs) * each
                    total += pair.copies * each
            yield _Draw(total, tuple(found))

    def _draws_of_entries(self) -> Iterable[_Draw]:
        places: dict[str, tuple[int, int]] = {}
        for i, item in enumerate(self._loose, len(self._stacks)):
            at = 0
            for one in (item,) if isinstance(item, Loose) else item.items:
                places[one.leaf.name] = (i, at)
                at += one.numel
        views = views_by_parameter(self._pairs, self._all.fixed)
        small: list[tuple[int, tuple[int, int, int, int] | None]] = []
        for name, leaf in self._rows.items():
            total, start, count = self._entries(leaf, views.get(name))
            if not total:
                continue
            found = (*places[name], start, count) if name in places else None
            if is_small(leaf):
                small.append((total, found))
            else:
                yield _Draw(total, () if found is None else (found,))
        at = 0
        here: list[tuple[int, int, int, int]] = []
        for total, found in small:
            if found is not None:
                part, to, start, count = found
                here.append((part, to, at + start, count))
            at += total
        if at:
            yield _Draw(at, tuple(here))

    def _entries(self, leaf: Leaf, views: Sequence[View] | None) -> tuple[int, int, int]:
        """How many free entries a parameter has in all, and before and among those here."""
        begin, end = self._shards.span(leaf.name)
        if leaf.name in self._kept:
            begin, end = 0, leaf.shape[0]
        if views is not None:
            free = free_entries(leaf, views)
            return int(free.sum()), int(free[:begin].sum()), int(free[begin:end].sum())
        rows, width = leaf.shape[0], leaf.shape[1:].numel()
        if leaf.name in self._reach:
            wanted = self._reach[leaf.name]
            rows, begin, end = len(wanted), int((wanted < begin).sum()), int((wanted < end).sum())
        return rows * width, begin * width, (end - begin) * width


def sites_of(symmetries: SymmetryMap, sizes: Mapping[str, int], ranks: int) -> list[Site]:
    """What folds and pairs tie together, each with an owner: the largest first, to whom has least."""
    claims: list[Symmetry] = [*symmetries.folds, *symmetries.pairs]
    partition: Partition[str] = Partition()
    for claim in claims:
        # One that has a single parameter is a site, too.
        for name in claim.parameters:
            partition.join(name, claim.parameters[0])
    members: dict[str, list[str]] = {}
    for name in sizes:
        if name in partition:
            members.setdefault(partition.group(name), []).append(name)
    load = [0] * ranks
    sites = []
    for names in sorted(members.values(), key=lambda names: -sum(sizes[n] for n in names)):
        owner = load.index(min(load))
        load[owner] += sum(sizes[n] for n in names)
        sites.append(Site(owner, tuple(names)))
    return sites


class _Traffic:
    """Parameters of sites between the ranks that have their rows and the ones that own them, a site at a time."""

    def __init__(self, shards: Shards, world: World, sites: Sequence[Site]) -> None:
        self._shards, self._world = shards, world
        own = [[s.parameters for s in sites if s.owner == rank] for rank in range(world.size)]
        most = max(map(len, own), default=0)
        self._rounds = [[sites[k] if k < len(sites) else () for sites in own] for k in range(most)]
        """For each round, of each owner, the parameters of one site."""

    def collect(self, rows: Callable[[str], Tensor], only: Iterable[str] | None = None) -> dict[str, Tensor]:
        """The whole of what ``rows`` gives part of, by name, for the sites that this rank owns."""
        out: dict[str, Tensor] = {}
        rank, size = self._world.rank, self._world.size
        for names in self._of(only):
            parts = [rows(n).reshape(-1) for owner in names for n in owner]
            given = torch.cat(parts)
            del parts
            takens = self._counts(names[rank])
            taken = given.new_empty(sum(takens))
            self._world.exchange(given, [sum(self._count(n, rank) for n in owner) for owner in names], taken, takens)
            del given
            whole = {n: taken.new_empty(self._shards.parameters[n].shape) for n in names[rank]}
            pieces = iter(taken.split([self._count(n, source) for source in range(size) for n in names[rank]]))
            for source in range(size):
                for name in names[rank]:
                    start, stop = self._shards.span(name, source)
                    whole[name][start:stop] = next(pieces).view_as(whole[name][start:stop])
            out |= whole
        return out

    def spread(self, whole: Mapping[str, Tensor], rows: Callable[[str], Tensor], only: Iterable[str]) -> None:
        """The way back: what the owners have goes to everyone's rows, in place."""
        rank, size = self._world.rank, self._world.size
        for names in self._of(only):
            like = rows(next(n for owner in names for n in owner))
            parts = [whole[n][slice(*self._shards.span(n, to))].reshape(-1) for to in range(size) for n in names[rank]]
            given = torch.cat(parts) if parts else like.new_empty(0)
            del parts
            takens = [sum(self._count(n, rank) for n in owner) for owner in names]
            taken = given.new_empty(sum(takens))
            self._world.exchange(given, self._counts(names[rank]), taken, takens)
            del given
            flat = [n for owner in names for n in owner]
            for name, piece in zip(flat, taken.split([self._count(n, rank) for n in flat]), strict=True):
                target = rows(name)
                target.copy_(piece.view_as(target))

    def _of(self, only: Iterable[str] | None) -> Iterable[list[tuple[str, ...]]]:
        """The rounds in which there is something to do, on any rank."""
        wanted = None if only is None else set(only)
        for owners in self._rounds:
            names = [tuple(n for n in owner if wanted is None or n in wanted) for owner in owners]
            if any(names):
                yield names

    def _counts(self, names: Sequence[str]) -> list[int]:
        """Entries of these that each rank has."""
        return [sum(self._count(n, rank) for n in names) for rank in range(self._world.size)]

    def _count(self, name: str, rank: int) -> int:
        start, stop = self._shards.span(name, rank)
        return (stop - start) * self._shards.parameters[name].shape[1:].numel()
