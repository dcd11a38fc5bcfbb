"""Geodesics of a pair in coefficient space.

For both metrics the acceleration of a geodesic is G times a small matrix plus its velocity times another, so a
geodesic from G with velocity ξ never leaves the span of the two: G(t) = G a(t) + ξ b(t) with a, b of size d x d.
Everything that happens along it is decided by the Gram matrices of (G, ξ), which are d x d as well; the tall
matrices enter only through them and through the end point.

A *state* is the coefficients c = [a; b] (copies, 2d, d); ``gram`` is the Gram matrix of [G, ξ] (copies, 2d, 2d).
Small matrices are float64 or complex128, whatever the dtype of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

Pairwise = tuple[Tensor, Tensor]
"""The same thing for the factor G and the factor H."""

Acceleration = Callable[[Pairwise, Pairwise], Pairwise]
"""(coefficients, velocities) -> accelerations, each for both factors."""

TOLERANCE = {torch.float32: 1e-7, torch.complex64: 1e-7, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Relative error of the end point of an integrated geodesic, by the dtype of the weights."""

SHORTEST = 1 / 4096
"""Length of a step, as a share of the whole, below which none is tried that is shorter."""

MOST = 256
"""Steps, also those that were too long: a graph of them is kept for the derivative."""

LONGER, SHORTER, SAFE = 4.0, 0.2, 0.9
"""How many times as long as the last step the next one is at most, at least, and as a share of what errors allow."""

PARTS = (2, 4, 6, 8)
"""Parts of the midpoint rules that make a step of the integration."""


@dataclass(frozen=True)
class Grams:
    """Gram matrices of the basis [G, ξ] of one factor: S = GᴴG (diagonal), C = ξᴴG, N = ξᴴξ; each (copies, d, d)."""

    s: Tensor
    c: Tensor
    n: Tensor

    def full(self) -> Tensor:
        """(copies, 2d, 2d): [[S, Cᴴ], [C, N]]."""
        top = torch.cat([torch.diag_embed(self.s).to(self.c.dtype), self.c.mH], dim=-1)
        return torch.cat([top, torch.cat([self.c, self.n], dim=-1)], dim=-2)


def hermitian(x: Tensor) -> Tensor:
    """X + Xᴴ."""
    return x + x.mH


def inv_acceleration(gram_g: Tensor, gram_h: Tensor, shift: Tensor) -> Acceleration:
    """Acceleration of the metric tr((S + δ)⁻¹ ξᴴζ) of each factor: ξ M (ξᴴG + Gᴴξ) - G M ξᴴξ, M = (S + δ)⁻¹.

    ``shift`` (copies, d) is δ, and 1 where the pair has no direction; the factors do not see each other.
    """
    diagonal = torch.diag_embed(shift)

    def factor(gram: Tensor, c: Tensor, v: Tensor) -> Tensor:
        gc, gv = gram @ c, gram @ v
        s = c.mH @ gc + diagonal
        right = torch.cat([hermitian(v.mH @ gc), v.mH @ gv], dim=-1)
        solved = torch.linalg.solve(s, right)
        d = c.shape[-1]
        return v @ solved[..., :d] - c @ solved[..., d:]

    return lambda c, v: (factor(gram_g, c[0], v[0]), factor(gram_h, c[1], v[1]))


def mix_acceleration(gram_g: Tensor, gram_h: Tensor, shift: Tensor) -> Acceleration:
    """Acceleration of the metric tr((T + δ) ξ_Gᴴζ_G) + tr((S + δ) ξ_Hᴴζ_H).

    For G: (G ξ_Hᴴξ_H - ξ_G (ξ_HᴴH + Hᴴξ_H)) (T + δ)⁻¹; for H the same with the factors exchanged.
    """
    diagonal = torch.diag_embed(shift)

    def factor(c: Tensor, v: Tensor, gram: Tensor, other_c: Tensor, other_v: Tensor) -> Tensor:
        gc, gv = gram @ other_c, gram @ other_v
        t = other_c.mH @ gc + diagonal
        force = c @ (other_v.mH @ gv) - v @ hermitian(other_v.mH @ gc)
        return torch.linalg.solve(t, force, left=False)

    return lambda c, v: (factor(c[0], v[0], gram_h, c[1], v[1]), factor(c[1], v[1], gram_g, c[0], v[0]))


@dataclass(frozen=True)
class SecondOrder:
    """The second-order end point G + ξ + ½ acceleration (arXiv 2505.05409, section 4) in an orthonormal basis.

    With Q = G S^-½ and coordinates u (ξ = u w), K = uᴴQ and W = uᴴu, both factors end at Q α + u β with

        α = diag(root) + p ∘ W,        β = diag(w) + a ∘ K + b ∘ Kᴴ

    (∘ entry by entry), where K and W are those of the other factor if ``swapped``. All of it is linear in K and W, so
    the way back for gradients is the same three products.

    Attributes:
        p, a, b: (copies, d, d), real; root, w: (copies, d).
    """

    p: Tensor
    a: Tensor
    b: Tensor
    root: Tensor
    w: Tensor
    swapped: bool

    @property
    def factors(self) -> tuple[Tensor, ...]:
        """All that it is made of."""
        return self.p, self.a, self.b, self.root, self.w

    def to(self, dtype: torch.dtype) -> SecondOrder:
        """The same in another real dtype."""
        p, a, b, root, w = (x.to(dtype) for x in self.factors)
        return SecondOrder(p, a, b, root, w, self.swapped)

    def coefficients(self, k: Tensor, n: Tensor) -> tuple[Tensor, Tensor]:
        """(α, β), each (2, copies, d, d) for both factors, from K and W of both."""
        if self.swapped:
            k, n = k.flip(0), n.flip(0)
        alpha, beta = self.p * n, (self.a * k).addcmul_(self.b, k.mH)
        alpha.diagonal(dim1=-2, dim2=-1).add_(self.root)
        beta.diagonal(dim1=-2, dim2=-1).add_(self.w)
        return alpha, beta

    def pullback(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in (K, W) of both factors from those in α and β."""
        k, n = (self.a * beta).add_((self.b * beta).mH), self.p * alpha
        return (k.flip(0), n.flip(0)) if self.swapped else (k, n)


def inv_second(s: Tensor, w: Tensor, shift: Tensor) -> SecondOrder:
    """For inv: G + ξ + ½ (ξ M (ξᴴG + Gᴴξ) - G M ξᴴξ), M = (S + δ)⁻¹; each factor on its own."""
    root, half = s.sqrt(), 0.5 / (s + shift)
    p = -(root * half * w).unsqueeze(-1) * w.unsqueeze(-2)
    a = (w * half * w).unsqueeze(-1) * root.unsqueeze(-2)
    b = (w * half * root).unsqueeze(-1) * w.unsqueeze(-2)
    return SecondOrder(p, a, b, root, w, swapped=False)


def mix_second(s: Tensor, w: Tensor, shift: Tensor) -> SecondOrder:
    """For mix: G + ξ_G + ½ (G ξ_Hᴴξ_H - ξ_G (ξ_HᴴH + Hᴴξ_H)) (T + δ)⁻¹."""
    root, half = s.sqrt(), 0.5 / (s + shift)
    p = (root * w).unsqueeze(-1) * (w * half).unsqueeze(-2)
    a = -(w * w).unsqueeze(-1) * (root * half).unsqueeze(-2)
    b = -(w * root).unsqueeze(-1) * (w * half).unsqueeze(-2)
    return SecondOrder(p, a, b, root, w, swapped=True)


def inv_exact(grams: Grams) -> Tensor:
    """Coefficients [a; b] (copies, 2d, d) of the end point of the exact geodesic of inv, without damping.

    inv is the quotient of the right-invariant Frobenius metric, whose geodesics are known in closed form; the
    exponential of the N x N generator reduces to d x d and 3d x 3d ones. In the orthonormal basis Q = G S^-½,
    u = ξ S^-½, with K = uᴴQ and W = uᴴu: G(1) S^-½ = Q e^K + [u, -Q] Φ, Φ the upper right 2d x d block of
    exp [[VᴴU, VᴴQ e^K], [0, 0]], VᴴU = [[Kᴴ, -1], [W, -K]], VᴴQ e^K = [1; K] e^K.
    """
    root = torch.where(grams.s > 0, grams.s, 1.0).rsqrt() * (grams.s > 0)
    k = root.unsqueeze(-1) * grams.c * root.unsqueeze(-2)
    w = root.unsqueeze(-1) * grams.n * root.unsqueeze(-2)
    d = k.shape[-1]
    one = _eye_like(k).expand_as(k)
    ek = torch.linalg.matrix_exp(k)
    generator = torch.cat([torch.cat([k.mH, -one, ek], -1), torch.cat([w, -k, k @ ek], -1)], -2)
    block = torch.nn.functional.pad(generator, (0, 0, 0, d))
    phi = torch.linalg.matrix_exp(block)[..., : 2 * d, 2 * d :]
    # Back from the orthonormal basis: G a + ξ b = Q √S a + u √S b.
    a, b = ek - phi[..., d:, :], phi[..., :d, :]
    scale = grams.s.sqrt()
    return torch.cat([root.unsqueeze(-1) * x * scale.unsqueeze(-2) for x in (a, b)], dim=-2)


def start(like: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients and velocity at t = 0: c = [1; 0], v = [0; 1], each (copies, 2d, d); ``like`` is (copies, d, d)."""
    one = _eye_like(like).expand_as(like)
    zero = torch.zeros_like(one)
    return torch.cat([one, zero], dim=-2), torch.cat([zero, one], dim=-2)


def integrate(acceleration: Acceleration, c: Pairwise, v: Pairwise, tolerance: float) -> Pairwise:
    """End point at t = 1 of the geodesic equation c̈ = acceleration(c, ċ), by steps as long as the tolerance allows.

    The error of a step is at most its share of the tolerance.

    Raises:
        ArithmeticError: the geodesic does not reach t = 1 (it leaves the full-rank pairs first): no step is short
            enough, or too many are needed.
    """
    left = length = 1.0
    for _ in range(MOST):
        length = min(length, left)
        try:
            *end, error = step(acceleration, c, v, length)
        except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
            # On its way a factor lost rank: with shorter steps it may not.
            end, error = [], math.inf
        share = error / (length * tolerance)
        if share <= 1:
            c, v = end
            left -= length
            if left <= 0:
                return c
        elif not length > SHORTEST:
            break
        length *= _times(share)
    raise ArithmeticError(
        f"the exact geodesic did not converge with steps of {length:.0e} of its length: the radius is too large for "
        "this metric; lower it or use the second-order geodesic"
    )


def _times(share: float) -> float:
    """How many times as long a step may be whose error is this share of what is allowed; the share goes by powers of 6.

    What is no number, or infinite, is too long by nobody knows how much.
    """
    if not share < math.inf:
        return SHORTER
    return min(LONGER, max(SHORTER, SAFE * share ** (-1 / 6))) if share > 0 else LONGER


def step(acceleration: Acceleration, c: Pairwise, v: Pairwise, length: float) -> tuple[Pairwise, Pairwise, float]:
    """Coefficients and velocity after a step of order 8, and the error of one of order 6.

    They are what midpoint rules of :data:`PARTS` parts tend to (Gragg, *On extrapolation algorithms for ordinary
    initial value problems*, 1965; Bulirsch and Stoer, 1966), whose errors are series in the squares of the lengths of
    their parts; of order 6 without the first. The error is relative to the largest coefficient of both factors, or the
    largest velocity, where they are above 1; NaN if anything is.
    """
    first = acceleration(c, v)
    ends = [_midpoints(acceleration, c, v, first, length, parts) for parts in PARTS]
    shares, limits = [], []
    for end in zip(*ends, strict=True):
        limit, other = _limit(end, PARTS), _limit(end[1:], PARTS[1:])
        with torch.no_grad():
            size, apart = (torch.stack([x.abs().max() for x in xs]).max() for xs in (limit, _move(limit, other, -1.0)))
            shares.append(apart / size.clamp_min(1.0))
        limits.append(limit)
    return limits[0], limits[1], float(torch.stack(shares).max())


def _midpoints(
    acceleration: Acceleration, c: Pairwise, v: Pairwise, first: Pairwise, length: float, parts: int
) -> tuple[Pairwise, Pairwise]:
    """Coefficients and velocity after a step of this length by an even number of parts; ``first`` is at its start."""
    dt = length / parts
    before, now = (c, v), (_move(c, v, dt), _move(v, first, dt))
    for _ in range(parts - 1):
        bend = acceleration(*now)
        before, now = now, (_move(before[0], now[1], 2 * dt), _move(before[1], bend, 2 * dt))
    return now


def _limit(ends: Sequence[Pairwise], parts: Sequence[int]) -> Pairwise:
    """What ends by so many parts tend to as these get short: of polynomials in 1/n² through them, the value at 0."""
    weights = [math.prod(n**2 / (n**2 - m**2) for m in parts if m != n) for n in parts]
    g, h = (sum(weight * end[i] for weight, end in zip(weights, ends, strict=True)) for i in (0, 1))
    return cast(Pairwise, (g, h))


def _move(x: Pairwise, v: Pairwise, dt: float) -> Pairwise:
    return x[0] + dt * v[0], x[1] + dt * v[1]


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
