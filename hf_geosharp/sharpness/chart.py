"""The chart: a borrowed model's weights as a point of a space, with the way to its parameters and back.

On construction the model is moved to the canonical representative (folds, then the canonical gauge of every pair);
its function stays. From then on tangent vectors go in (:meth:`Chart.write`) and gradients come out
(:meth:`Chart.pull`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from hf_geosharp.geometry.gauge import CUTOFF, Canonical, canonical
from hf_geosharp.geometry.integration import EndlessError
from hf_geosharp.geometry.metrics import (
    ENTRY_FRAMES,
    PAIR_METRICS,
    EndPoint,
    EntryFrame,
    FactorFrame,
    Order,
    Tensors,
)
from hf_geosharp.geometry.space import Part, Recipe, Space, Tangent, Vector
from hf_geosharp.sharpness.borrow import Borrowed
from hf_geosharp.sharpness.loose import Bundle, Loose, bundled, free_entries, lies_in, views_by_parameter
from hf_geosharp.sharpness.memory import give_back
from hf_geosharp.sharpness.stacks import Bound, Stack, device_of, stacked
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import Leaf
from hf_geosharp.symmetry.views import View, shape_of

_LARGE = 1 << 23
"""Coordinates from which on memory that is free has to be free for others, too; before, it is not worth the time."""


@dataclass(frozen=True)
class Geometry:
    """Which metric and geodesic a score uses.

    ``metric`` inv or mix: on pairs, with the adaptive metric (straight lines) on everything else. ``metric``
    adaptive or euclidean: on all parameters as they are stored.
    """

    metric: str = "inv"
    geodesic: Order = "second"
    damping: float = 0.0

    @property
    def paired(self) -> bool:
        """Whether symmetries are used at all."""
        return self.metric in PAIR_METRICS


@dataclass(frozen=True)
class Owned:
    """Coordinates of one part of a space that belong together: those of a pair, or of a loose parameter.

    ``part`` is None where they lie on another process. ``entries`` picks copies of a part of pairs, or entries of a
    bundle; None is all of the part.
    """

    part: int | None
    name: str
    pair: Pair | None = None
    entries: Tensor | slice | None = None


class Chart:
    """A borrowed model in coordinates. Reads and writes the model; whoever borrowed it restores it."""

    def __init__(
        self,
        borrowed: Borrowed,
        symmetries: SymmetryMap,
        geometry: Geometry,
        *,
        nudge: float = 0.0,
        seed: int = 0,
        ranks: Sequence[tuple[Tensor, ...]] = (),
    ) -> None:
        """The model has to hold the borrowed originals.

        ``nudge`` moves all weights by that much, relative and at random (from ``seed``), before anything else: what
        symmetries touch entry by entry, every other parameter as a whole, which takes no memory. ``ranks`` are those of
        the pairs before, which such a move may raise.
        """
        self._borrowed, self.geometry = borrowed, geometry
        self._tensors = {name: leaf.tensor for name, leaf in borrowed.leaves.items()}
        self.reduced: list[str] = []
        if not geometry.paired:
            symmetries = SymmetryMap()
        # Entries in two pairs would be written twice.
        symmetries, _ = symmetries.separated()
        self.symmetries = symmetries
        self._nudge, self._generator = nudge, torch.Generator().manual_seed(seed)
        base = dict(borrowed.originals)
        pairs = [symmetries.coordinates(p) for p in symmetries.pairs]
        with torch.no_grad():
            for name in symmetries.parameters if nudge else ():
                self._tensors[name].mul_(1 + nudge * self._noise(self._tensors[name]))
                base.pop(name, None)
            for name in self._fold(symmetries):
                base.pop(name, None)
            parts: list[Part] = []
            self._stacks: list[Stack] = []
            self._bound: list[Bound] = []
            self.ranks: list[tuple[Tensor, ...]] = []
            """Of the pairs of each stack."""
            for i, stack in enumerate(stacked(pairs, lambda pair: device_of(self._tensors[pair.parameters[0]]))):
                part = self._pair_part(stack, ranks[i] if ranks else ())
                self.ranks.append(part.frame.ranks)
                parts.append(part)
                self._stacks.append(stack)
                self._bound.append(stack.bind(self._tensors, part.shapes, part.complex))
            self._paired = tuple(dict.fromkeys(n for b in self._stacks for n in b.parameters))
            self._loose = bundled(self._loose_leaves(pairs, symmetries.fixed))
            parts += [self._loose_part(item, base) for item in self._loose]
            self._wide.clear()
        self.space = self._space_of(parts)
        self._whole = (self.space, self._loose)
        self._workspaces: dict[tuple[torch.device, int], Tensor] = {}
        self._ends: Sequence[EndPoint | None] | None = None
        """The way back from the point of the space that the model holds."""
        self._again: dict[int, Recipe] = {}
        """For parts whose velocity the way back needs and nobody keeps: what it is made of again."""

    def _space_of(self, parts: Sequence[Part]) -> Space:
        """The space that these parts make, of what is in :attr:`_loose`."""
        return Space(parts, self._borrowed.dtype, next(iter(self._tensors.values())).device)

    # -------------------------------------------------------------------------------------------------------- focus

    def widen(self) -> None:
        """Every parameter is in reach again: undoes :meth:`focus`, and puts the base point into the model."""
        # What is out of focus has stayed at the base point, where geodesics of all orders begin alike.
        self.write(self.space.zeros(), "first")
        self._change(*self._whole)

    def _change(self, space: Space, loose: list[Loose | Bundle]) -> None:
        """Goes on with other loose parts, while the model holds the base point. The new ones have no end point yet."""
        assert self._ends is not None
        known = dict(zip(map(id, self.space.parts), self._ends, strict=True))
        self.space, self._loose = space, loose
        self._ends = [known.get(id(part)) for part in space.parts]

    @torch.no_grad()
    def focus(self, rows: Mapping[str, Tensor]) -> None:
        """Leaves out what a batch cannot reach: all rows of these parameters but the ones given.

        The rows of an embedding for tokens that a batch does not have get no gradient anywhere in the ball and stay
        where they are; without them steps are as much shorter. To be called at the base point with the gradients of
        the batch in place: a parameter that has a gradient in other rows (for it is used elsewhere too) keeps them.
        """
        assert self.space is self._whole[0], "widen comes first"
        space, loose = self._whole
        found: dict[str, bool] = {}
        for item in loose:
            if isinstance(item, Loose) and item.leaf.name in rows and item.leaf.alike and item.window() is not None:
                leaf = item.leaf
                gradient, wanted = leaf.gradient(), leaf.rows_here(rows[leaf.name])
                found[leaf.name] = lies_in(gradient, wanted)
        narrow = self._narrowed(found)
        parts, kept, count = list(space.parts), list(loose), len(self._stacks)
        for i, item in enumerate(loose):
            if isinstance(item, Loose) and item.leaf.name in narrow:
                wanted = item.leaf.rows_here(rows[item.leaf.name])
                kept[i] = Loose(item.leaf, rows=wanted)
                part = parts[count + i]
                frame = part.frame
                assert isinstance(frame, EntryFrame)
                theta = frame.theta.view(item.leaf.tensor.shape)[wanted].view(1, -1)
                parts[count + i] = replace(part, frame=type(frame)(theta, frame.scale), shapes=(tuple(theta.shape),))
        if narrow:
            self._change(self._space_of(parts), kept)
        assert self._ends is not None
        self._ends = [self._start(p) if e is None else e for p, e in zip(self.space.parts, self._ends, strict=True)]

    def _start(self, part: Part) -> EndPoint:
        """Where a part is at u = 0."""
        zero = torch.zeros(part.numel, dtype=self.space.dtype, device=self.space.place(part))
        end = part.frame.geodesic(part.split(zero), "first")
        end.point = ()
        return end

    def _narrowed(self, found: Mapping[str, bool]) -> set[str]:
        """Of the parameters that rows are known of, those whose gradient lies in these rows alone."""
        return {name for name, alone in found.items() if alone}

    # ----------------------------------------------------------------------------------------------------- ownership

    @property
    def model(self) -> nn.Module:
        """The borrowed model."""
        return self._borrowed.model

    @property
    def leaves(self) -> Mapping[str, Leaf]:
        """The pieces of storage that may move, in the order of the model's parameters."""
        return self._borrowed.leaves

    def owned(self) -> Iterator[Owned]:
        """What all coordinates belong to, in or out of focus."""
        for i, stack in enumerate(self._stacks):
            for pair, start in zip(stack.pairs, stack.starts, strict=True):
                yield Owned(i, pair.name, pair, torch.arange(start, start + pair.copies))
        for i, item in enumerate(self._loose, len(self._stacks)):
            if isinstance(item, Loose):
                yield Owned(i, item.leaf.name)
                continue
            starts = [0, *accumulate(item.sizes)]
            for one, start, stop in zip(item.items, starts, starts[1:], strict=False):
                yield Owned(i, one.leaf.name, None, slice(start, stop))

    # ------------------------------------------------------------------------------------------------ construction

    def _noise(self, like: Tensor) -> Tensor:
        """Standard normal noise of the shape and kind of ``like``, drawn on the CPU."""
        noise = torch.randn(like.shape, generator=self._generator, dtype=torch.float64)
        return noise.to(like.device, like.dtype)

    def _fold(self, symmetries: SymmetryMap) -> list[str]:
        """Moves the model to the representative of every fold, in float64; returns the parameters that changed."""
        touched = list(dict.fromkeys(p for f in symmetries.folds for p in f.parameters))
        # A fold may reach from one device to another.
        homes = {device_of(self._tensors[n]) for n in touched}
        home = self._tensors[touched[0]].device if len(homes) > 1 else None
        weights = {n: self._tensors[n].to(home, torch.float64, copy=True) for n in touched}
        for fold in symmetries.folds:
            fold.canonicalise(weights)
        # Pairs read these in float64, not yet rounded to the model's dtype.
        self._wide = weights
        for name, value in weights.items():
            self._tensors[name].copy_(value)
        return touched

    def _pair_part(self, stack: Stack, ranks: tuple[Tensor, ...]) -> Part:
        first = stack.pairs[0]
        complex_ = first.group.complex
        copies = sum(p.copies for p in stack.pairs)
        shapes = [(copies, *shape_of(views)[1:]) for views in (first.g, first.h)]
        wide = {n: self._wide.get(n, self._tensors[n]) for p in stack.pairs for n in p.parameters}
        wide = {n: t.to(torch.float64) for n, t in wide.items()}
        device = self._tensors[first.parameters[0]].device
        dtype = torch.complex128 if complex_ else torch.float64
        factors = [torch.empty(s, dtype=dtype, device=device) for s in shapes]
        stack.read(wide, factors)
        del wide
        narrow = self._borrowed.dtype
        tall = torch.promote_types(narrow, torch.complex64) if complex_ else narrow
        name = f"{first.kind}:{first.group.name}"
        if first.group.isometric:
            alone = FactorFrame(factors[0].mT, factors[1].mT, tall, cutoff=CUTOFF, ranks=ranks)
            return Part(name, alone, tuple(shapes), complex_, self.geometry.geodesic, device)
        rank = ranks[0] if ranks else None
        base = canonical(factors[0].mT, factors[1].mT, cutoff=CUTOFF, rank=rank, positive=first.group.positive)
        del factors
        self._report_rank(stack, base)
        frame = PAIR_METRICS[self.geometry.metric].frame(_lean(base, tall), tall, damping=self.geometry.damping)
        return Part(name, frame, tuple(shapes), complex_, self.geometry.geodesic, device)

    def _report_rank(self, stack: Stack, base: Canonical) -> None:
        rank, d = base.rank.tolist(), base.s.shape[-1]
        for pair, start in zip(stack.pairs, stack.starts, strict=True):
            short = [i for i in range(pair.copies) if rank[start + i] < d]
            if short:
                which = ", ".join(f"{i} (rank {rank[start + i]})" for i in short[:8])
                self.reduced.append(f"{pair.name}: {len(short)} of {pair.copies} below rank {d}: copies {which}")

    def _loose_leaves(self, pairs: Sequence[Pair], fixed: Sequence[View]) -> list[Loose]:
        """What is left for the elementwise metric: every entry not in a pair and not fixed."""
        views = views_by_parameter(pairs, fixed)
        loose = []
        for name, leaf in self._borrowed.leaves.items():
            if name not in views:
                loose.append(Loose(leaf))
                continue
            free = leaf.here(free_entries(leaf, views[name]))
            if bool(free.any()):
                loose.append(Loose(leaf, free.reshape(-1).nonzero().squeeze(1)))
        return loose

    def _loose_part(self, item: Loose | Bundle, base: Mapping[str, Tensor]) -> Part:
        names = [i.leaf.name for i in (item.items if isinstance(item, Bundle) else (item,))]
        name = ", ".join(names)
        theta = item.take(lambda n: base[n] if n in base else self._tensors[n].clone())
        scale = 1.0
        if self._nudge and all(n in base for n in names):
            scale += self._nudge * float(torch.randn((), generator=self._generator))
        frame = ENTRY_FRAMES["adaptive" if self.geometry.paired else self.geometry.metric](theta, scale)
        order: Order = "first" if self.geometry.paired else self.geometry.geodesic
        return Part(name, frame, (tuple(theta.shape),), False, order, theta.device)

    # ---------------------------------------------------------------------------------------------------- transport

    @torch.no_grad()
    def write(self, u: Vector, order: Order | None = None) -> None:
        """Puts the weights γ_u(1) into the model, and remembers the way back for :meth:`pull`.

        Nothing of a recipe stays in memory, and its vectors have to be as they are until then. ``order`` takes another
        geodesic than the chart's.

        Raises:
            EndlessError: a geodesic that is integrated does not get there.
        """
        self._again, self._ends, ends = {}, None, []
        for i, part in enumerate(self.space.parts):
            if i < len(self._stacks):
                piece = u.piece(i, self._workspace(part, 1) if isinstance(u, Recipe) else None)
                place = part.split(self._workspace(part, 0))
                try:
                    end = part.frame.geodesic(part.split(piece), order or part.order, place)
                except EndlessError as error:
                    where = ", ".join(map(self._stacks[i].name_of, error.copies))
                    raise EndlessError(error.copies, error.share, where) from None
                self._bound[i].write([x.mT for x in end.point])
            else:
                item = self._loose[i - len(self._stacks)]
                target = item.window() if isinstance(item, Loose) else None
                # Where all is entry by entry, the velocity may lie where the end point comes.
                piece = u.piece(i, None if target is None else target.view(-1))
                out = None if target is None else (target,)
                end = part.frame.geodesic(part.split(piece), order or part.order, out)
                if target is None:
                    item.put(end.point[0])
            end.point = ()
            if isinstance(u, Recipe) and end.velocity:
                self._again[i], end.velocity = u, ()
            ends.append(end)
        self._ends = ends

    @torch.no_grad()
    def pull(self) -> Tangent:
        """The horizontal gradient with respect to u of the loss whose gradients the parameters hold.

        Takes the parameters' gradients away: those of loose parameters become pieces of the result, in place.
        """
        count = len(self._stacks)
        gradients = {n: self._borrowed.leaves[n].gradient() for n in self._paired}
        loose = []
        for i, item in enumerate(self._loose, count):
            row = item.take(lambda n: gradients[n] if n in gradients else self._borrowed.leaves[n].gradient())
            loose.append(self._pullback(i, (row,), (row,))[0].view(-1))
        last = {name: i for i, stack in enumerate(self._stacks) for name in stack.parameters}
        self._release(n for n in self._borrowed.leaves if n not in last)
        pieces = []
        for i, (part, bound) in enumerate(zip(self.space.parts, self._bound, strict=False)):
            covector = part.storage(self._workspace(part, 0))
            bound.read(gradients, covector)
            # What is read for the last time goes before the result comes.
            done = [n for n in self._stacks[i].parameters if last[n] == i]
            for name in done:
                del gradients[name]
            self._release(done)
            piece = torch.empty(part.numel, dtype=self.space.dtype, device=self.space.place(part))
            self._pullback(i, tuple(x.mT for x in covector), part.split(piece))
            pieces.append(piece)
        if self.space.size > _LARGE:
            give_back()
        return Tangent((*pieces, *loose))

    def _pullback(self, i: int, covector: Tensors, out: Tensors) -> Tensors:
        """The gradient in the coordinates of one part, in ``out``."""
        assert self._ends is not None
        part, end = self.space.parts[i], self._ends[i]
        assert end is not None, "focus comes before pull"
        if i not in self._again:
            return end.pullback(covector, out=out)
        memory = self._workspace(part, 1) if i < len(self._stacks) else None
        end.velocity = part.split(self._again[i].piece(i, memory))
        try:
            return end.pullback(covector, out=out)
        finally:
            end.velocity = ()

    def _workspace(self, part: Part, which: int) -> Tensor:
        """Memory for the coordinates of a part of pairs while it is worked on; one of two that all of them share.

        They stay: what comes and goes at every step, in many sizes, leaves gaps in the memory of a process.
        """
        place = self.space.place(part)
        key = place, which
        if key not in self._workspaces:
            most = max(p.numel for p in self._whole[0].parts[: len(self._stacks)] if self.space.place(p) == place)
            self._workspaces[key] = torch.empty(most, dtype=self.space.dtype, device=place)
        return self._workspaces[key][: part.numel]

    def _release(self, names: Iterable[str]) -> None:
        """Takes the gradients of these away from their parameters."""
        for name in names:
            for p, _ in self._borrowed.leaves[name].members:
                p.grad = None

    def share(self, u: Tangent) -> dict[str, float]:
        """Pair site or parameter -> its share of ‖u‖²."""
        total = self.space.dot(u, u) or 1.0
        out: dict[str, float] = {}
        for i, (part, piece) in enumerate(self.space.slices(u)):
            if i >= len(self._stacks):
                item = self._loose[i - len(self._stacks)]
                items, sizes = (item.items, item.sizes) if isinstance(item, Bundle) else ((item,), [piece.numel()])
                for one, entries in zip(items, piece.split(sizes), strict=True):
                    out[one.leaf.name] = float((entries.double() ** 2).sum()) / total
                continue
            for pair, start in zip(self._stacks[i].pairs, self._stacks[i].starts, strict=True):
                own = [x[start : start + pair.copies] for x in part.storage(piece)]
                out[pair.name] = sum(float((x.abs().double() ** 2).sum()) for x in own) / total
        return out


def _lean(base: Canonical, tall: torch.dtype) -> Canonical:
    """The representative with its tall frames in the working dtype and without what only :func:`act` needs."""
    none = base.s.new_empty(0)
    return Canonical(base.frame_g.to(tall), base.frame_h.to(tall), base.s, none, none)
