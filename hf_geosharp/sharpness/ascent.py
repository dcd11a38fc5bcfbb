"""Climbing an objective inside a ball of a space; knows neither models nor data.

Auto-PGD (Croce & Hein 2020, arXiv 2003.01690, algorithm 1) in the metric: in the coordinates of a
:class:`~hf_geosharp.geometry.space.Space` that is projected gradient ascent in a plain ball.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_geosharp.geometry.space import Space

MOMENTUM = 0.75
IMPROVING = 0.75
"""Share of the steps since the last checkpoint that have to improve for the step size to stay."""

NOISE = 10.0
"""A slope that raises the loss by less than this many roundings of it inside the ball is rounding itself."""

Evaluate = Callable[[Tensor, bool], tuple[float, Tensor | None]]
"""(u, wants gradient) -> loss at γ_u(1), and its horizontal gradient in u if wanted."""

Report = Callable[[int, float], None]
"""Called after each step with its number and the best rise so far."""


class NotFiniteError(ValueError):
    """The loss is NaN or infinite before any step."""


@dataclass(frozen=True)
class Climb:
    """The best point found. ``rise`` is its loss less ``base``; ``history`` the best rise after each step."""

    u: Tensor
    rise: float
    base: float
    history: tuple[float, ...]
    finite: bool

    @property
    def steps(self) -> int:
        """Steps taken."""
        return len(self.history) - 1

    @property
    def converged(self) -> bool:
        """Whether the last quarter of the steps raised the value by less than one per cent of it."""
        if self.steps < 4:
            return False
        earlier = self.history[-1 - self.steps // 4]
        return self.history[-1] - earlier <= 0.01 * abs(self.history[-1])


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
    start: Tensor | None = None,
    base: float | None = None,
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
        generator: for a first direction where the gradient at the start vanishes.
        report: called after each step.

    Raises:
        NotFiniteError: the loss at the start is not finite.
    """
    x = space.zeros() if start is None else start.clone()
    loss, g = evaluate(x, True)
    if not math.isfinite(loss):
        raise NotFiniteError(f"the loss before any step is {loss}")
    base = loss if base is None else base
    assert g is not None
    if rho * space.norm(g) <= NOISE * torch.finfo(g.dtype).eps * max(1.0, abs(loss)):
        # At a stationary point rounding must not choose the way: a seeded direction is the same for equal functions.
        g.zero_()
    old = x.clone()
    best, best_g, best_loss = x.clone(), g, loss
    history = [best_loss - base]
    marks = checkpoints(steps)
    eta, last_mark, improved = 2.0 * rho, 0, 0
    eta_at_mark, best_at_mark = eta, best_loss
    finite, momentum = True, False
    for k in range(1, steps + 1):
        x, old = _step(space, x, old, _direction(space, g, generator), eta, rho, MOMENTUM if momentum else 1.0), x
        momentum = True
        del g
        new_loss, g = evaluate(x, k < steps)
        good = math.isfinite(new_loss)
        finite = finite and good
        improved += good and new_loss > loss
        loss = new_loss if good else -math.inf
        if good and new_loss > best_loss:
            best_loss = new_loss
            best.copy_(x)
            if g is not None:
                best_g = g
        history.append(best_loss - base)
        if report is not None:
            report(k, best_loss - base)
        if k == steps:
            break
        assert g is not None
        if k in marks or not good:
            few = improved < IMPROVING * (k - last_mark)
            stuck = eta == eta_at_mark and best_loss == best_at_mark
            eta_at_mark, best_at_mark = eta, best_loss
            last_mark, improved = k, 0
            if few or stuck or not good:
                eta /= 2
                x.copy_(best)
                old.copy_(best)
                g, loss, momentum = best_g, best_loss, False
    return Climb(best, best_loss - base, base, tuple(history), finite)


def _direction(space: Space, g: Tensor, generator: torch.Generator | None) -> Tensor:
    """g, or a random horizontal vector where there is no gradient to follow."""
    if bool(g.any()) and bool(torch.isfinite(g).all()):
        return g
    return space.random(generator or torch.Generator().manual_seed(0))


def _step(space: Space, x: Tensor, old: Tensor, g: Tensor, eta: float, rho: float, alpha: float) -> Tensor:
    """P(x + α (z - x) + (1 - α)(x - old)) with z = P(x + η g/‖g‖); the result takes the place of ``old``.

    P is the radial projection on the ball. The inner products decide all coefficients beforehand, so that the vectors
    are read once more and nothing else of their size is made.
    """
    gg, xg, og, xx, ox, oo = space.dots((g, g), (x, g), (old, g), (x, x), (old, x), (old, old))
    unit = eta / math.sqrt(gg) if gg > 0 else 0.0
    length = math.sqrt(max(0.0, xx + 2 * unit * xg + unit**2 * gg))
    shrink = min(1.0, rho / length) if length > 0 else 1.0
    a, b, c = alpha - 1.0, 2 - 2 * alpha + alpha * shrink, alpha * shrink * unit
    square = a * a * oo + b * b * xx + c * c * gg + 2 * (a * b * ox + a * c * og + b * c * xg)
    # A hair inside, so that rounding does not leave the ball.
    inside = rho * (1 - 16 * torch.finfo(x.dtype).eps)
    scale = min(1.0, inside / math.sqrt(square)) if square > 0 else 1.0
    return space.combine_(old, scale * a, (x, scale * b), (g, scale * c))


def average(
    space: Space,
    evaluate: Evaluate,
    rho: float,
    draws: int,
    generator: torch.Generator,
    *,
    base: float,
    report: Report | None = None,
) -> tuple[float, Tensor]:
    """Mean rise of the loss under Gaussian horizontal perturbations with E‖u‖² = rho², and the last of them.

    ``draws`` are in antithetic pairs (u, -u), which cancels the first-order term; one forward pass a draw.
    """
    scale = rho / math.sqrt(max(space.dimension, 1))
    total, u = 0.0, space.zeros()
    for k in range(draws):
        u = -u if k % 2 else space.random(generator).mul_(scale)
        total += evaluate(u, False)[0] - base
        if report is not None:
            report(k + 1, total / (k + 1))
    return total / draws, u
