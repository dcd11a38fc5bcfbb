"""The published baseline, written anew from its description: adaptive worst-case sharpness by projected ascent.

Andriushchenko et al. 2023 (arXiv 2302.07011) measure it by Auto-PGD in the elementwise ball ‖δ / w‖ <= ρ, with code
that this module follows step by step, its peculiarities included, so that cost and value can be compared:

- the loss is evaluated after each step without a gradient and then, at the same weights, again with one: 20 steps are
  41 forward and 20 backward passes;
- a step goes along |w| times the gradient, its length by the plain norm of the gradient: 2 ρ at first;
- the projection on the ball is the nearest point of the ellipsoid, found by bisection of its multiplier;
- the next point is 3/4 of the projected one and 1/4 of the one *before* the last;
- the step is halved at the checkpoints 5, 9, 12, 15, ... (of 20) where fewer than 3/4 of the steps since the last
  checkpoint, or none, found a higher loss. The model then gets the best weights back, but the perturbation does not:
  the next gradient is taken at the best point and added to the last one.

Where a weight is exactly 0 its part of the norm is 0/0, and comparisons with NaN leave the ball switched off. With
``guard`` such weights are left out of the norm; they cannot move anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.75
ENOUGH = 0.75
NEAR = 1e-5
"""How far from ρ a projected norm may end."""


@dataclass(frozen=True)
class Found:
    """The highest rise, the norm of its perturbation, the largest norm of any, and the passes.

    Norms are ‖δ / w‖ over the weights that are not 0.
    """

    rise: float
    norm: float
    largest: float
    forwards: int
    backwards: int


def checkpoints(steps: int) -> list[int]:
    """After which steps the step size may be halved: 0.22 of all, then gaps that shrink by 0.03 down to 0.06.

    Rounded up as they come in floating point, as the published code does: 0.7 of 20 steps is 15.
    """
    last, share, marks = 0.0, 0.22, [math.ceil(0.22 * steps)]
    while marks[-1] < steps:
        last, share = share, share + max(share - last - 0.03, 0.06)
        marks.append(math.ceil(share * steps))
    return marks


def worst_case(
    model: nn.Module,
    batch: Mapping[str, Any],
    rho: float,
    steps: int = 20,
    *,
    adaptive: bool = True,
    guard: bool = True,
) -> Found:
    """The highest rise of the batch's loss that the ascent finds; the model's weights come back."""
    with _restored(model) as weights:
        return _Ascent(model, batch, weights, rho, adaptive, guard).run(steps)


@contextmanager
def _restored(model: nn.Module) -> Iterator[list[Tensor]]:
    weights = [p.detach().clone() for p in model.parameters()]
    try:
        yield weights
    finally:
        _load(model, weights)
        model.zero_grad()


def _load(model: nn.Module, values: Sequence[Tensor]) -> None:
    with torch.no_grad():
        for p, value in zip(model.parameters(), values, strict=True):
            p.copy_(value)


def _length(tensors: Sequence[Tensor]) -> float:
    return float(torch.stack([t.square().sum() for t in tensors]).sum().sqrt())


class _Ascent:
    """One ball around the weights."""

    def __init__(
        self,
        model: nn.Module,
        batch: Mapping[str, Any],
        weights: Sequence[Tensor],
        rho: float,
        adaptive: bool,
        guard: bool,
    ) -> None:
        self.model, self.batch, self.weights, self.rho, self.guard = model, batch, weights, rho, guard
        self.sizes = [w.abs() if adaptive else torch.ones_like(w) for w in weights]
        self.projection = self._nearest if adaptive else self._radial
        self.forwards = self.backwards = 0

    def run(self, steps: int) -> Found:
        """All steps; the loss without perturbation counts as the first value."""
        base = best = self._loss()
        best_norm = largest = 0.0
        best_weights = [w.clone() for w in self.weights]
        delta = [torch.zeros_like(w) for w in self.weights]
        before = [d.clone() for d in delta]
        eta = eta_then = 2 * self.rho
        best_then, mark, improved = best, 0, 0
        marks = checkpoints(steps)
        for step in range(steps):
            delta, before = self._step(delta, before, eta), [d.clone() for d in delta]
            _load(self.model, [w + d for w, d in zip(self.weights, delta, strict=True)])
            loss = self._loss()
            norm = self.norm(delta)
            largest = max(largest, norm)
            if loss > best:
                best, best_norm, improved = loss, norm, improved + 1
                best_weights = [p.detach().clone() for p in self.model.parameters()]
            if step in marks:
                few, stuck = improved < ENOUGH * (step - mark), eta == eta_then and best == best_then
                eta_then, best_then, mark, improved = eta, best, step, 0
                if few or stuck:
                    eta /= 2
                    _load(self.model, best_weights)
        return Found(best - base, best_norm, largest, self.forwards, self.backwards)

    def _loss(self) -> float:
        self.forwards += 1
        with torch.no_grad():
            return float(self.model(**self.batch).loss)

    def _gradients(self) -> list[Tensor]:
        """At the weights that the model has."""
        self.forwards += 1
        self.backwards += 1
        self.model.zero_grad()
        self.model(**self.batch).loss.backward()
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]

    @torch.no_grad()
    def norm(self, delta: Sequence[Tensor]) -> float:
        """‖δ / w‖ over the weights that are not 0."""
        parts = [torch.where(s > 0, d / s, 0.0) for d, s in zip(delta, self.sizes, strict=True)]
        return _length(parts)

    @torch.no_grad()
    def _compared(self, delta: Sequence[Tensor]) -> float:
        """The norm that decides whether a point is in the ball."""
        if self.guard:
            return self.norm(delta)
        return _length([d / s for d, s in zip(delta, self.sizes, strict=True)])

    def _step(self, delta: Sequence[Tensor], before: Sequence[Tensor], eta: float) -> list[Tensor]:
        gradients = self._gradients()
        with torch.no_grad():
            length = _length(gradients) + 1e-12
            ahead = [d + eta / length * g * s for d, g, s in zip(delta, gradients, self.sizes, strict=True)]
            inside = self.projection(ahead)
            return [MOMENTUM * z + (1 - MOMENTUM) * b for z, b in zip(inside, before, strict=True)]

    def _radial(self, delta: list[Tensor]) -> list[Tensor]:
        norm = self._compared(delta)
        return [d * (self.rho / norm) for d in delta] if norm > self.rho else delta

    def _nearest(self, delta: list[Tensor]) -> list[Tensor]:
        """The nearest point of the ellipsoid, δ / (1 + 2 λ / w²), by bisection in λ; δ itself if it is inside."""
        norm = self._compared(delta)
        if not norm > self.rho:
            return delta
        multiplier, low, high, limit = 0.1, 0.0, 10.0, 10.0
        point = delta
        while abs(norm - self.rho) > NEAR:
            point = [d / (1 + 2 * multiplier / s.square()) for d, s in zip(delta, self.sizes, strict=True)]
            norm = self._compared(point)
            if norm > self.rho:
                multiplier, low = (multiplier + high) / 2, multiplier
            else:
                multiplier, high = (low + multiplier) / 2, multiplier
            if limit - high < 1e-2:
                limit, high = 2 * limit, 2 * high
        return point
