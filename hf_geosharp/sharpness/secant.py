"""The secant ascent: climbs an objective inside a ball by a quadratic model that two gradients make.

Around the best point c so far the loss is taken for

    m(u) = F(c) + ⟨g, u - c⟩ + ½ ⟨u - c, B (u - c)⟩ - ½ σ ‖u - c‖²,

and the next point is the maximum of m over the whole ball: a trust-region problem in the span of four vectors, solved
exactly. B explains how the gradient changed over the last step that raised the loss (Powell's symmetric Broyden
formula, with a curvature added across the step), or is nothing where the loss at the other end of that step shows that
it is far from quadratic along it. Without B and σ the next point is that of the fixed point, ρ g/‖g‖. σ keeps steps
from overshooting: where a point turns out lower it is raised until m would have been exact there, and it falls while m
keeps its word. As σ falls the maximum may leap across the ball, to where nothing is known; so no step is much longer
than the last one that raised the loss, or as long as one that did not.

Steps get short at a maximum, but also near a saddle of the loss on the sphere, and where it is flat along the sphere.
From there it may go up many times, once steps have found out: each can be several times as long as the one before. So
the climb goes on where the model bends along the sphere by nearly as much as a maximum allows. To know that takes no
pass, and no vector.

A step is one forward pass and, where it raises the loss, one backward pass; the climb ends when it has
:func:`settled`. It holds four tangent vectors (c, g, the last step and the change of the gradient over it) beside the
point that is evaluated. In a large space that one is not kept: whoever evaluates it gets what it is made of. Once its
loss is known to be higher it takes the place of the last step, of which nothing is needed any more, before there is
another gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hf_geosharp.geometry.space import Space, Sum, Tangent, Vector
from hf_geosharp.sharpness.ascent import Climb, Evaluate, Report, begun, inside, rounding
from hf_geosharp.sharpness.trust_region import Array, Quadratic

TOLERANCE = 2e-3
"""Share of the rise that is not worth a step."""

RELEASE = 0.5
"""Factor of σ after a step that raised the loss."""

GROW = 3.0
"""How many times as long as the last step that raised the loss the next one may be."""

SHRINK = 0.5
"""How many times as long as the last step, if that did not raise the loss."""

SURE = 0.1
"""Share of TOLERANCE that the next step may promise where one small step is enough to end the climb."""

SLOPE = 5e-3
"""Share of the rise that the slope alone may promise in the ball where a climb ends."""

FLAT = 0.65
"""Share of the multiplier up to which a loss that bends along the sphere is like a maximum; beyond 1 it is none.

Chosen among 0.6, 0.65 and 0.7 over the balls of ``benchmarks/ascent.py``.
"""

KEPT = 1 << 22
"""Coordinates of a space up to which the point that is evaluated is kept: it takes less time."""


def settled(
    rises: Sequence[float], promise: float, noise: float, slope: float = 0.0, bend: float = 0.0, *, last: bool = False
) -> bool:
    """Whether the steps have become short, the next one promises next to nothing, and the point is like a maximum.

    Short: the last two steps brought at most TOLERANCE of the rise (or rounding), and the next one promises no more;
    the last step alone will do if it raised the loss and the next one promises but SURE of that. Like a maximum: the
    loss bends by at most FLAT along the sphere; near a saddle steps are short, however far up it goes from there.
    Where there is no other step (``last``), one of the two will do: short steps unless it is a saddle, or a maximum
    that the next step promises to be as high as. Nothing will do where the slope would raise the loss by more than
    SLOPE of the rise on the way across the ball: where the steps have become short because the loss is rough, they
    bring little on a hillside, too.

    ``rises`` is the best rise before the first step and after each one.
    """
    if len(rises) <= 3 or slope > max(SLOPE * abs(rises[-1]), noise):
        return False
    least, next_to_nothing = (max(share * abs(rises[-1]), noise) for share in (TOLERANCE, SURE * TOLERANCE))
    if promise > least:
        return False
    sure = 0 < rises[-1] - rises[-2] <= least and promise <= next_to_nothing
    short = sure or rises[-1] - rises[-3] <= least
    if last:
        return bend <= (1 if short else FLAT)
    return short and bend <= FLAT


def secant(
    space: Space,
    evaluate: Evaluate,
    rho: float,
    steps: int,
    *,
    start: Tangent | None = None,
    base: float | None = None,
    given: tuple[float, Tangent] | None = None,
    stationary: bool = False,
    generator: torch.Generator | None = None,
    report: Report | None = None,
) -> Climb:
    """The largest loss found with ‖u‖ <= rho, by at most ``steps`` + 1 evaluations.

    Those have a gradient that are better than all before, and the first one; not the last one that the steps allow.

    Args:
        space: where to climb.
        evaluate: the objective.
        rho: radius of the ball.
        steps: ascent steps at most.
        start: where to start, inside the ball; the base point (u = 0) if None. Its memory is used.
        base: the loss at the base point, needed with ``start``.
        given: loss and gradient at the start where they are known already, which saves its evaluation. Its
            memory is used.
        stationary: the base point is a minimum by construction: the first step follows a random direction.
        generator: for a first direction where the gradient at the start vanishes.
        report: called after each step.

    Raises:
        NotFiniteError: the loss at the start is not finite.
    """
    u = space.zeros() if start is None else start
    loss, g, base = begun(evaluate, u, given, base)
    squares = (0.0 if start is None else space.dot(u, u), space.dot(g, g))
    slope = rho * math.sqrt(squares[1])
    if not math.isfinite(slope):
        g, squares = space.zeros(), (squares[0], 0.0)
    walk = _Walk(space, rho, u, loss, g, squares, 1.0 if stationary else 0.0)
    walk.finite = math.isfinite(slope)
    # At a stationary point rounding must not choose the way: a seeded direction is the same for equal functions.
    walk.lost = (stationary and start is None) or not rounding(space, max(1.0, abs(loss))) < slope
    del u, g, given, start  # the walk lets go of them when it has better ones
    generator = generator or torch.Generator().manual_seed(0)
    history = [loss - base]
    counted = [loss - base]
    """Without points that had no finite loss: of them nothing follows."""
    for k in range(1, steps + 1):
        promise = walk.plan()
        done = settled(counted, promise, walk.noise, walk.slope, walk.bend, last=k == steps)
        point = None if done else walk.next(promise, generator)
        if point is None:
            return Climb(walk.u, walk.loss - base, base, tuple(history), walk.finite, "converged")
        good = walk.take(*evaluate(point, walk.wants if k < steps else False))
        del point
        history.append(walk.loss - base)
        if good:
            counted.append(history[-1])
        if report is not None:
            report(k, history[-1])
    return Climb(walk.u, walk.loss - base, base, tuple(history), walk.finite)


@dataclass(frozen=True)
class _Step:
    """A step seen from its better end: where its other end lies, and how gradient and loss are different there."""

    s: Tangent
    y: Tangent
    loss: float


class _Walk:
    """The best point with its loss and gradient, and what is known of the loss around it."""

    def __init__(
        self, space: Space, rho: float, u: Tangent, loss: float, g: Tangent, squares: tuple[float, float],
        size: float = 0.0,
    ) -> None:  # fmt: skip
        self.space, self.rho = space, rho
        self._noise = rounding(space, size)
        """What rounding makes of a loss whose terms are of this size, however small it is."""
        self.u, self.loss, self.g = u, loss, g
        self._squares = squares
        """⟨u, u⟩ and ⟨g, g⟩."""
        self.finite = True
        self.lost = False
        """Whether the next step goes in a random direction."""
        self._inside = inside(space, rho)
        self._reach = self._inside
        self._last: _Step | None = None
        self._sigma = 0.0
        self._longest = math.inf
        """How long the next step may be."""
        self._model: Quadratic | None = None
        """Of what is known now; None until it is asked for."""
        self._plan: Array = np.empty(0)
        self._promised = self._length = 0.0
        """What the model without σ says of the point that is proposed, and how far that is from the best one."""
        self._proposed: Vector | None = None
        self._square = 0.0
        """⟨proposed, proposed⟩."""

    @property
    def noise(self) -> float:
        """A difference of losses that rounding can make."""
        return rounding(self.space, self.loss)

    @property
    def slope(self) -> float:
        """How much the slope alone promises at the far side of the ball: 0 where the gradient points out of it.

        max ⟨g, z - u⟩ over the ball, the gap of Frank and Wolfe; above it no concave loss has its maximum. To be asked
        after :meth:`plan`.
        """
        if self._model is None:
            return 0.0
        center, slope = self._model.center, self._model.slope
        return float(self.rho * np.linalg.norm(slope) - center @ slope)

    @property
    def bend(self) -> float:
        """How much the model bends along the sphere, as a share of what a maximum allows; after :meth:`plan`."""
        return 0.0 if self._model is None else self._model.bend(self.rho)

    def plan(self) -> float:
        """Finds where to go; returns what the model promises at its maximum, also where that is too far for a step.

        For a climb has not settled because its steps are short.
        """
        if self.lost:
            return 0.0
        if self._model is None:
            self._model = self._modelled((), (self.u, self.g))
        plan = self._model.largest(self._sigma, self.rho)
        gain, length = self._model.gain(plan)
        promise = gain - self._sigma * length**2 / 2
        if length > self._longest:
            plan = self._model.within(self._longest, self._sigma, self.rho)
            gain, length = self._model.gain(plan)
        self._plan, self._promised, self._length = plan, gain, length
        return promise

    def next(self, promise: float, generator: torch.Generator) -> Vector | None:
        """The planned point; None if it promises nothing, unless that is because nothing is known yet."""
        lost, self.lost = self.lost, False
        if not lost and promise > 0 and self._length > self.rho - self._inside:
            return self._make()
        return self._anywhere(generator) if lost or not self._squares[1] > 0 else None

    def _make(self) -> Vector:
        assert self._model is not None
        recipe = self._model.recipe(self._plan, self._inside)
        self._proposed = None  # its memory may do for this one
        # Where there is a last step the point can take its memory later on. None is taken while activations are there.
        point = self.space.empty() if self.space.size <= KEPT or self._last is None else None
        vector: Vector = recipe if point is None else point
        (self._square,) = self.space.sweep(() if point is None else (Sum(point, recipe),), ((vector, vector),))
        size = math.sqrt(self._square)
        if size > (self.rho + self._inside) / 2:
            # The vectors have so much in common that their products do not tell how long it is.
            recipe = replace(recipe, factor=self._inside / size)
            self._square *= recipe.factor**2
            if point is not None:
                point.mul_(recipe.factor)
        self._proposed = recipe if point is None else point
        return self._proposed

    def _anywhere(self, generator: torch.Generator) -> Tangent:
        """A random point as far away as there were finite losses."""
        point = self.space.random(generator)
        point.mul_(self._reach / self.space.norm(point))
        self._promised, self._length = 0.0, self._reach
        self._proposed = self.space.combine(point, (point, 1.0), (self.u, 1.0 - self._reach / self._inside))
        self._square = self.space.dot(point, point)
        return self._proposed

    def wants(self, loss: float) -> bool:
        """Whether the gradient at the proposed point is wanted, which then is made of what it takes the place of."""
        if not math.isfinite(loss) or (loss <= self.loss and self._last is not None):
            return False
        self._point()
        return True

    def _point(self) -> Tangent:
        """The proposed point; from then on nothing is known of the last step, whose memory it may have."""
        proposed, last, self._last, self._model = self._proposed, self._last, None, None
        assert proposed is not None
        if isinstance(proposed, Tangent):
            return proposed
        if proposed.kept is not None:
            return proposed.kept
        assert last is not None, "without a last step a point is no recipe"
        return self.space.keep(proposed, last.s)

    def take(self, loss: float, g: Tangent | None) -> bool:
        """Goes to the proposed point if it is better, and learns from it; False if nothing finite is known of it."""
        slope = 0.0 if g is None or not math.isfinite(loss) else self.space.dot(g, g)
        good = math.isfinite(loss) and math.isfinite(slope)
        self.finite = self.finite and good
        rise = loss - self.loss
        if not good:
            # Nothing is known but that this was too far.
            self._reach /= 2
            self._longest = SHRINK * self._length
            self._sigma = max(4 * self._sigma, 2 * self.space.norm(self.g) / self.rho)
            return False
        # Rounding is no word that the model has broken.
        short = self._promised - rise if abs(self._promised - rise) > self._noise else 0.0
        exact = 2 * short / self._length**2
        if rise > 0:
            most = 4 * self._sigma or math.inf
            self._sigma = max(RELEASE * self._sigma, min(exact, most))
            self._longest = GROW * self._length
            self._squares = self._square, slope
            self._go(loss, g)
        else:
            self._sigma = max(self._sigma, exact)
            self._longest = SHRINK * self._length
            if self._last is None and g is not None:
                other, self._proposed = self._point(), None
                self._learn(self.g, other, g, rise)
        return True

    def _go(self, loss: float, g: Tangent | None) -> None:
        """The proposed point, with gradient g, is the best one now."""
        point, self._proposed = self._point(), None
        left, fall = self.u, self.loss - loss
        self.u, self.loss = point, loss
        if g is not None:
            # What was left, and the gradient there, turn into the step.
            self._learn(g, left, self.g, fall)
            self.g = g

    def _learn(self, g: Tangent, other: Tangent, gradient: Tangent, rise: float) -> None:
        """Keeps the step from the best point, with gradient g, to another one that is higher by ``rise``.

        It takes the memory of that point and its gradient.
        """
        self._last = _Step(other, gradient, rise)
        steps = [Sum.of(a, (a, 1.0), (b, -1.0)) for a, b in ((other, self.u), (gradient, g))]
        self._model = self._modelled(steps, (self.u, g, other, gradient))

    def _modelled(self, sums: Sequence[Sum], vectors: tuple[Tangent, ...]) -> Quadratic:
        """What is known once these sums are worked out."""
        gram = np.zeros((len(vectors), len(vectors)))
        places = [(i, j) for j in range(len(vectors)) for i in range(j + 1) if i < j or i > 1]
        products = self.space.sweep(sums, [(vectors[i], vectors[j]) for i, j in places])
        for (i, j), product in zip(places, products, strict=True):
            gram[i, j] = gram[j, i] = product
        gram[0, 0], gram[1, 1] = self._squares
        limit = max(1e-10, 100 * torch.finfo(self.space.dtype).eps)
        noise = max(self.noise, self._noise)
        return Quadratic(vectors, gram, limit, None if self._last is None else self._last.loss, noise)
