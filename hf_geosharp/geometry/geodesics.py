"""Geodesics of a pair in coefficient space.

For both metrics the acceleration of a geodesic is G times a small matrix plus its velocity times another, so a
geodesic from G with velocity ξ never leaves the span of the two: G(t) = G a(t) + ξ b(t) with a, b of size d x d.
Everything that happens along it is decided by the Gram matrices of (G, ξ), which are d x d as well; the tall
matrices enter only through them and through the end point.

A *state* is the coefficients c = [a; b] (copies, 2d, d); ``gram`` is the Gram matrix of [G, ξ] (copies, 2d, 2d).
Small matrices are float64 or complex128, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Pairwise = tuple[Tensor, Tensor]
"""The same thing for the factor G and the factor H."""

Acceleration = Callable[[Pairwise, Pairwise], Pairwise]
"""(coefficients, velocities) -> accelerations, each for both factors."""

TOLERANCE = {torch.float32: 1e-7, torch.complex64: 1e-7, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Relative error at which the integration stops refining its step, by the dtype of the weights."""

MAX_STEPS = 1024


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


def integrate(acceleration: Acceleration, c: Pairwise, v: Pairwise, steps: int) -> Pairwise:
    """End point at t = 1 by ``steps`` classical Runge-Kutta steps of the geodesic equation c̈ = acceleration(c, ċ)."""
    dt = 1.0 / steps
    for _ in range(steps):
        a1 = acceleration(c, v)
        v2 = _move(v, a1, dt / 2)
        a2 = acceleration(_move(c, v, dt / 2), v2)
        v3 = _move(v, a2, dt / 2)
        a3 = acceleration(_move(c, v2, dt / 2), v3)
        v4 = _move(v, a3, dt)
        a4 = acceleration(_move(c, v3, dt), v4)
        c, v = (
            _pairwise(lambda x, p, q, r, s: x + dt / 6 * (p + 2 * q + 2 * r + s), c, v, v2, v3, v4),
            _pairwise(lambda x, p, q, r, s: x + dt / 6 * (p + 2 * q + 2 * r + s), v, a1, a2, a3, a4),
        )
    return c


def integrate_to_tolerance(acceleration: Acceleration, c: Pairwise, v: Pairwise, tolerance: float) -> Pairwise:
    """End point at t = 1, with the number of steps doubled until two results agree within ``tolerance``.

    The comparison is the Runge-Kutta error estimate |x_2n - x_n| / 15 relative to the largest coefficient.

    Raises:
        ArithmeticError: the geodesic does not reach t = 1 (it leaves the full-rank pairs first), so that no number
            of steps up to 1024 agrees.
    """
    steps, last = 2, None
    with torch.no_grad():
        while steps <= MAX_STEPS:
            try:
                end = integrate(acceleration, c, v, steps)
            except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
                # On its way a factor lost rank: with shorter steps it may not.
                steps, last = 2 * steps, None
                continue
            if last is not None:
                error = max(float((x - y).abs().max()) for x, y in zip(end, last, strict=True)) / 15
                if error <= tolerance * max(1.0, *(float(x.abs().max()) for x in end)):
                    break
            steps, last = 2 * steps, end
        else:
            raise ArithmeticError(
                f"the exact geodesic did not converge in {MAX_STEPS} steps: the radius is too large for this metric; "
                "lower it or use the second-order geodesic"
            )
    if torch.is_grad_enabled() and any(x.requires_grad for x in acceleration(c, v)):
        return integrate(acceleration, c, v, steps)
    return end


def _move(x: Pairwise, v: Pairwise, dt: float) -> Pairwise:
    return x[0] + dt * v[0], x[1] + dt * v[1]


def _pairwise(f: Callable[..., Tensor], *xs: Pairwise) -> Pairwise:
    return f(*(x[0] for x in xs)), f(*(x[1] for x in xs))


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
