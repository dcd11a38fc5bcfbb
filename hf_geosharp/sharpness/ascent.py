"""Climbing an objective inside a ball of a space; knows neither models nor data.

What every ascent takes and gives, and the reference among them: Auto-PGD (Croce & Hein 2020, arXiv 2003.01690,
algorithm 1) in the metric, which in the coordinates of a :class:`~hf_geosharp.geometry.space.Space` is projected
gradient ascent in a plain ball. The default is in :mod:`hf_geosharp.sharpness.secant`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hf_geosharp.geometry.space import Space, Tangent, Vector

MOMENTUM = 0.75
IMPROVING = 0.75
"""Share of the steps since the last checkpoint that have to improve for the step size to stay."""

NOISE = 10.0
"""A slope that raises the loss by less than this many roundings of it inside the ball is rounding itself."""

Wanted = bool | Callable[[float], bool]
"""Whether a gradient is wanted, or what is asked that, once, when the loss is known: many points need none."""

Evaluate = Callable[[Vector, Wanted], tuple[float, Tangent | None]]
"""(u, gradient wanted) -> loss at γ_u(1), and its horizontal gradient in u if wanted."""

Report = Callable[[int, float], None]
"""Called after each step with its number and the best rise so far."""


def is_wanted(gradient: Wanted, loss: float) -> bool:
    """The answer, where this is the loss."""
    return gradient(loss) if callable(gradient) else gradient


def inside(space: Space, rho: float) -> float:
    """A hair less than a radius, so that rounding does not leave the ball."""
    return rho * (1 - 16 * torch.finfo(space.dtype).eps)


def rounding(space: Space, loss: float) -> float:
    """A difference that rounding can make in a loss of this size."""
    return NOISE * torch.finfo(space.dtype).eps * abs(loss)


class NotFiniteError(ValueError):
    """The loss is NaN or infinite before any step."""


@dataclass(frozen=True)
class Climb:
    """The best point found. ``rise`` is its loss less ``base``; ``history`` the best rise after each step.

    ``stopped`` says why the climb ended: "converged" by its own rule, or "budget" when its steps were used up.
    """

    u: Tangent
    rise: float
    base: float
    history: tuple[float, ...]
    finite: bool
    stopped: str = "budget"

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self.history) - 1

    @property
    def lost(self) -> bool:
        """Whether it found nothing, and points without a finite loss kept it from looking."""
        return self.rise == 0 and not self.finite

    @property
    def converged(self) -> bool:
        """Whether it stopped by its own rule, or the last quarter of its steps raised the value by less than 1 %.

        Not if it is :attr:`lost`.
        """
        if self.lost:
            return False
        if self.stopped == "converged":
            return True
        if self.steps < 4:
            return False
        earlier = self.history[-1 - self.steps // 4]
        return self.history[-1] - earlier <= 0.01 * abs(self.history[-1])


def begun(
    evaluate: Evaluate, start: Tangent, given: tuple[float, Tangent] | None, base: float | None
) -> tuple[float, Tangent, float]:
    """The loss and its gradient where a climb starts, as far as they are not ``given``, and the loss it rises from.

    Raises:
        NotFiniteError: the loss at the start is not finite.
    """
    loss, g = given or evaluate(start, True)
    if not math.isfinite(loss):
        raise NotFiniteError(f"the loss before any step is {loss}")
    assert g is not None
    return loss, g, loss if base is None else base


def checkpoints(steps: int) -> list[int]:
    """Steps after which the step size may be halved: 0.22, then gaps shrinking by 0.03 down to 0.06, of all steps."""
    p, q, out = 0.0, 0.22, []
    while q < 1.0:
        out.append(math.ceil(round(q * steps, 9)))
        p, q = q, q + max(q - p - 0.03, 0.06)
    return sorted(set(out))


def auto_pgd(
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
    """The largest loss found with ‖u‖ <= rho, by exactly ``steps`` + 1 evaluations, all but the last with gradient.

    Args:
        space: where to climb.
        evaluate: the objective.
        rho: radius of the ball.
        steps: ascent steps.
        start: where to start, inside the ball; the base point (u = 0) if None.
        base: the loss at the base point, needed with ``start``.
        given: loss and gradient at the start where they are known already, which saves its evaluation.
        stationary: the base point is a minimum by construction: the first step follows a random direction.
        generator: for a first direction where the gradient at the start vanishes.
        report: called after each step.

    Raises:
        NotFiniteError: the loss at the start is not finite.
    """
    x = space.zeros() if start is None else start.clone()
    g: Tangent | None
    loss, g, base = begun(evaluate, x, given, base)
    slope = rho * space.norm(g)
    if (stationary and start is None) or slope <= rounding(space, max(1.0, abs(loss))):
        # At a stationary point rounding must not choose the way: a seeded direction is the same for equal functions.
        g.mul_(0.0)
    walk = _Walk(space, x, rho, loss, g)
    history = [loss - base]
    marks = checkpoints(steps)
    eta, last_mark, improved = 2.0 * rho, 0, 0
    eta_at_mark, best_at_mark = eta, loss
    finite = True
    for k in range(1, steps + 1):
        walk.step(g, eta, generator)
        del g
        new_loss, g = evaluate(walk.x, walk.sees if k < steps else False)
        walk.sees(new_loss)
        if walk.best is walk.x:
            walk.best_g = g
        good = math.isfinite(new_loss)
        finite = finite and good
        improved += good and new_loss > loss
        loss = new_loss if good else -math.inf
        history.append(walk.best_loss - base)
        if report is not None:
            report(k, history[-1])
        if k == steps:
            break
        if k in marks or not good:
            few = improved < IMPROVING * (k - last_mark)
            stuck = eta == eta_at_mark and walk.best_loss == best_at_mark
            eta_at_mark, best_at_mark = eta, walk.best_loss
            last_mark, improved = k, 0
            if few or stuck or not good:
                eta /= 2
                walk.restart()
                g, loss = walk.best_g, walk.best_loss
        assert g is not None
    return Climb(walk.best, walk.best_loss - base, base, tuple(history), finite)


class _Walk:
    """The point, the one before and the best one, in three buffers that change places instead of being copied.

    The best one has its loss and, once that is known, its gradient. The inner products of ``x`` and ``old`` are kept
    up to date by the same linear combinations as the vectors.
    """

    def __init__(self, space: Space, x: Tangent, rho: float, loss: float, g: Tangent) -> None:
        self.space, self.rho = space, rho
        self.best_loss = loss
        self.best_g: Tangent | None = g
        self.x = self.old = self.best = x
        self.inside = inside(space, rho)
        self.spare: list[Tangent] = []
        self.xx = self.ox = self.oo = 0.0
        self.momentum = 1.0
        self.restart()

    def sees(self, loss: float) -> bool:
        """Notes whether the point is the best so far; its gradient is wanted in any case.

        The gradient at the best one before is let go of, before there is another.
        """
        if math.isfinite(loss) and loss > self.best_loss:
            self._release(self.best)
            self.best = self.x
            self.best_loss, self.best_g = loss, None
        return True

    def restart(self) -> None:
        """Back to the best point, without momentum."""
        for buffer in (self.x, self.old):
            self._release(buffer)
        self.x = self.old = self.best
        self.xx = self.ox = self.oo = self.space.dot(self.best, self.best)
        self.momentum = 1.0

    def _release(self, buffer: Tangent) -> None:
        """Notes a buffer that is about to lose one of its three roles."""
        roles = sum(buffer is other for other in (self.x, self.old, self.best))
        if roles == 1 and not any(buffer is s for s in self.spare):
            self.spare.append(buffer)

    def step(self, g: Tangent, eta: float, generator: torch.Generator | None) -> None:
        """x <- P(x + α (z - x) + (1 - α)(x - old)) with z = P(x + η g/‖g‖).

        P is the radial projection on the ball; where there is no gradient to follow, g is a random horizontal vector.
        Inner products decide all coefficients beforehand, so that each vector is read once more and that is all.
        """
        space, alpha = self.space, self.momentum
        gg, xg, og = space.dots((g, g), (self.x, g), (self.old, g))
        if not (gg > 0 and math.isfinite(gg)):
            g = space.random(generator or torch.Generator().manual_seed(0))
            gg, xg, og = space.dots((g, g), (self.x, g), (self.old, g))
        unit = eta / math.sqrt(gg) if gg > 0 else 0.0
        length = math.sqrt(max(0.0, self.xx + 2 * unit * xg + unit**2 * gg))
        shrink = min(1.0, self.rho / length) if length > 0 else 1.0
        a, b, c = alpha - 1.0, 2 - 2 * alpha + alpha * shrink, alpha * shrink * unit
        square = a * a * self.oo + b * b * self.xx + c * c * gg
        square += 2 * (a * b * self.ox + a * c * og + b * c * xg)
        scale = min(1.0, self.inside / math.sqrt(square)) if square > 0 else 1.0
        a, b, c = scale * a, scale * b, scale * c
        if self.old is not self.x and self.old is not self.best:
            new = self.old
        else:
            new = self.spare.pop() if self.spare else space.empty()
        space.combine(new, (self.old, a), (self.x, b), (g, c))
        self.old, self.x = self.x, new
        self.oo, self.ox, self.xx = self.xx, a * self.ox + b * self.xx + c * xg, scale**2 * max(square, 0.0)
        self.momentum = MOMENTUM


def average(
    space: Space,
    evaluate: Evaluate,
    rho: float,
    draws: int,
    generator: torch.Generator,
    *,
    base: float,
    report: Report | None = None,
) -> tuple[float, Tangent]:
    """Mean rise of the loss under Gaussian horizontal perturbations with E‖u‖² = rho², and the last of them.

    ``draws`` are in antithetic pairs (u, -u), which cancels the first-order term; one forward pass a draw.
    """
    scale = rho / math.sqrt(max(space.dimension, 1))
    total, u = 0.0, space.zeros()
    for k in range(draws):
        u = u.mul_(-1.0) if k % 2 else space.random(generator).mul_(scale)
        total += evaluate(u, False)[0] - base
        if report is not None:
            report(k + 1, total / (k + 1))
    return total / draws, u
