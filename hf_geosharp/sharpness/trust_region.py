"""The small problem of a secant step: a quadratic in the span of a few vectors, and its maximum in a ball.

It has a handful of dimensions, is solved several times a step, and globally, so that neither rounding nor the choice
of axes says which way an ascent goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from hf_geosharp.geometry.space import Recipe, Tangent

Array = NDArray[np.float64]

TRUST = 0.3
"""Relative error of a step's quadratic at its other end up to which it is used."""

TIE = 1e-3
"""Relative slope along the top axis of the model below which either side of it is as good."""

SAME = 1e-9
"""Relative difference of eigenvalues up to which they are one."""

ON_SPHERE = 1e-3
"""Relative distance from the sphere up to which a point lies on it."""

HALVINGS = 30
"""Of an interval of σ, to find the step that is not too long."""

NEWTON = 50
"""Newton steps at most, which rise to the root; a few are enough."""


class Quadratic:
    """⟨slope, z - center⟩ + ½ ⟨z - center, hessian (z - center)⟩, in an orthonormal basis of the span of its vectors.

    These are u and the gradient g there, and with a step s over which the gradient changed by y these, too.
    """

    def __init__(
        self, vectors: tuple[Tangent, ...], gram: Array, limit: float, loss: float | None, noise: float
    ) -> None:
        """Of (u, g) or (u, g, s, y) with these inner products; ``loss`` is how much higher it is at the end of s.

        Directions that vectors have in common but for a share of ``limit`` of their squares are left out: coordinates
        are (k,), with k at most the number of vectors.

        Args:
            vectors: two or four; gram: their inner products, (2, 2) or (4, 4).
            loss: None where there is no step; noise: a difference of losses that rounding can make, in nats.
        """
        # A step that rounding swallowed says nothing.
        if loss is not None and not (gram[2, 2] > 0 and _holds(gram, loss, noise)):
            vectors, gram = vectors[:2], gram[:2, :2]
        if not np.isfinite(gram).all():
            # Too long for products of them to be numbers: nothing is known, or no more than where one is.
            vectors, gram = vectors[:2], gram[:2, :2]
            gram = gram if np.isfinite(gram).all() else np.zeros((2, 2))
        self.vectors, self._gram = vectors, gram
        inverse = np.array([1 / math.sqrt(x) if x > 0 else 0.0 for x in gram.diagonal().tolist()])
        values, axes = np.linalg.eigh(inverse[:, None] * gram * inverse)
        # Below this the directions of nearly dependent vectors are rounding.
        kept = values > limit
        self.basis: Array = inverse[:, None] * axes[:, kept] / np.sqrt(values[kept])
        coordinates = self.basis.T @ gram
        self.center, self.slope = coordinates[:, 0], coordinates[:, 1]
        self.hessian = np.zeros((len(coordinates), len(coordinates)))
        if len(self.vectors) == 4:
            self.hessian = _curvature(coordinates[:, 2], coordinates[:, 3])

    def largest(self, sigma: float, rho: float) -> Array:
        """Coordinates of the maximum in the ball of radius rho, with σ taken from the hessian."""
        damped = self.hessian - sigma * np.eye(len(self.center))
        return largest_in_ball(self.slope - damped @ self.center, damped, rho, self.center)

    def within(self, longest: float, sigma: float, rho: float) -> Array:
        """The same for the least σ, not below this one, at which the step is not longer than that.

        As σ grows the step gets shorter, but it may do so in a leap: between a far maximum and a near one that are as
        good. Where the near one is no step at all, the point at that distance on the way to the far one is taken.
        """
        unit = sigma + _norm(self.slope) / rho
        low, high = 0.0, math.inf
        length = self.lengths(rho)
        for _ in range(HALVINGS):
            middle = (low + high) / 2 if high < math.inf else 2 * low + unit
            if length(sigma + middle) <= longest:
                high = middle
            else:
                low = middle
        near = self.center if high == math.inf else self.largest(sigma + high, rho)
        if _norm(near - self.center) > TIE * longest:
            return near
        step = self.largest(sigma + low, rho) - self.center
        return self.center + step * (longest / _norm(step))

    def lengths(self, rho: float) -> Callable[[float], float]:
        """How long the step to the maximum is for each σ: in the axes of the hessian, which σ leaves.

        Where sides of the top axis are about equally good it is measured.
        """
        values, axes = np.linalg.eigh(self.hessian)
        w, slope, center = (x.tolist() for x in (values, axes.T @ self.slope, axes.T @ self.center))

        def length(sigma: float) -> float:
            highest = w[-1] - sigma
            same = SAME * max(abs(w[0] - sigma), abs(highest))
            linear = [s - (a - sigma) * c for s, a, c in zip(slope, w, center, strict=True)]
            lead = math.hypot(*(x for x, a in zip(linear, w, strict=True) if a >= w[-1] - same))
            if lead <= 2 * TIE * (math.hypot(*linear) + rho * abs(highest)):
                return _norm(self.largest(sigma, rho) - self.center)
            damped = [a - sigma for a in w]
            z = _resolved(linear, damped, _multiplier(linear, damped, rho, lead))
            return math.hypot(*(x - c for x, c in zip(z, center, strict=True)))

        return length

    def gain(self, z: Array) -> tuple[float, float]:
        """What it promises of the step to z, without σ, and the length of that step."""
        step = z - self.center
        return float(self.slope @ step + step @ self.hessian @ step / 2), _norm(step)

    def bend(self, rho: float) -> float:
        """Its largest curvature along the sphere of radius rho, as a share of the multiplier; 0 inside the ball.

        The slope presses the center against the sphere by the multiplier ⟨slope, center⟩/rho², which is what the sphere
        takes off every curvature along it. So a maximum has at most 1 (the second-order condition of Moré and Sorensen,
        1983), a saddle more, and where it is nearly 1 the loss is flat. Infinite where nothing presses.
        """
        size = _norm(self.center)
        if size < (1 - ON_SPHERE) * rho:
            return 0.0
        outwards = self.center / size
        across = np.eye(len(outwards)) - outwards[:, None] * outwards
        top = float(np.linalg.eigvalsh(across @ self.hessian @ across)[-1])
        multiplier = float(self.slope @ outwards) / size
        if not top > 0:
            return 0.0
        return top / multiplier if multiplier > 0 else math.inf

    def recipe(self, z: Array, inside: float) -> Recipe:
        """The tangent vector with these coordinates, or as much of it as is not longer than ``inside``."""
        coefficients = self.basis @ z
        size = math.sqrt(max(float(coefficients @ self._gram @ coefficients), 0.0))
        if size > inside:
            coefficients = coefficients * (inside / size)
        terms = list(zip(self.vectors, coefficients.tolist(), strict=True))
        # The last step comes first, whose memory the point may take.
        return Recipe(tuple(terms[2:3] + terms[:2] + terms[3:]))


def _holds(gram: Array, loss: float, noise: float) -> bool:
    """Whether the quadratic that slope and change of gradient make along the last step has its loss at the other end.

    ``gram`` has the inner products of u, g, s and y.
    """
    linear, curved = float(gram[1, 2]), float(gram[2, 3]) / 2
    return abs(loss - linear - curved) <= TRUST * (abs(linear) + abs(curved)) + noise


def _curvature(s: Array, y: Array) -> Array:
    """The B of the model: B s = y, and as much against the direction in which the gradient turned as it turned.

    Nothing is known of the curvature across the step. The least symmetric B has none, so that it rises in a direction
    between the two however the gradient turned, and long steps go there in vain.
    """
    size = _norm(s)
    s, y = s / size, y / size
    along = float(s @ y)
    across = y - along * s
    turn = _norm(across)
    mixed = across[:, None] * s
    matrix: Array = along * (s[:, None] * s) + mixed + mixed.T
    return matrix - across[:, None] * across / turn if turn > 0 else matrix


def largest_in_ball(linear: Array, matrix: Array, rho: float, near: Array) -> Array:
    """The z (n,) with ‖z‖ <= rho that maximises linear·z + ½ zᵀ matrix z, globally, for a small symmetric matrix.

    Of two that are about equally good the one nearer to ``near``: rounding must not choose. The maximum is
    (multiplier - matrix)⁻¹ linear with a multiplier that makes it as long as rho, or 0 (Moré and Sorensen, *Computing
    a trust region step*, 1983).

    Args:
        linear, near: (n,); matrix: (n, n), symmetric; rho: positive.
    """
    if not len(linear):
        return linear
    values, axes = np.linalg.eigh(matrix)
    slope = axes.T @ linear
    highest = float(values[-1])
    # Which axes an eigenvalue has that is there several times is chance: they are one thing.
    rest = int((values < highest - SAME * max(abs(float(values[0])), abs(highest))).sum())
    lead = slope[rest:]
    c = [*slope[:rest].tolist(), _norm(lead)]
    w = [*values[:rest].tolist(), highest]
    if highest < 0 and math.hypot(*_resolved(c, w, 0.0)) <= rho:
        return np.asarray(axes @ (slope / -values))
    multiplier = _multiplier(c, w, rho, c[-1])
    if multiplier <= 0:
        return np.zeros_like(linear)
    # On the sphere. Where the slope has hardly a part along the top axes, the maximum lies on either side of them.
    below = slope[:rest] / (multiplier - values[:rest])
    if c[-1] <= TIE * (math.hypot(*c) + rho * abs(highest)):
        side = axes[:, rest:].T @ near
        lead = side if _norm(side) > SAME * rho else lead
    if not lead.any():
        lead = np.ones_like(lead)
    height = math.sqrt(max(rho**2 - float(below @ below), 0.0))
    return np.asarray(axes @ np.concatenate([below, lead * (height / _norm(lead))]))


def _resolved(slope: Sequence[float], values: Sequence[float], multiplier: float) -> list[float]:
    """Coordinates of (multiplier - matrix)⁻¹ slope in the axes of the matrix."""
    return [a / (multiplier - b) if a else 0.0 for a, b in zip(slope, values, strict=True)]


def _multiplier(slope: Sequence[float], values: Sequence[float], rho: float, lead: float) -> float:
    """The least multiplier, not negative and not below the matrix, at which :func:`_resolved` is not longer than rho.

    By Newton's method from below. ``values`` ascend; ``lead`` is the length of the slope along the top ones.
    """
    # The pole lies below this, and this below the root.
    low = max(values[-1] + lead / rho, 0.0)
    if lead and low <= values[-1]:
        low = math.nextafter(low, math.inf)
    for _ in range(NEWTON):
        z = _resolved(slope, values, low)
        size = math.hypot(*z)
        if size <= rho * (1 + 1e-15):
            break
        bend = sum(x * x / (low - b) for x, b in zip(z, values, strict=True) if x)
        low += (size / rho - 1) * size**2 / bend
    return low


def _norm(x: Array) -> float:
    return math.sqrt(float(x @ x))
