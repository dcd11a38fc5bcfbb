"""Geodesics of a pair in coefficient space.

For both metrics the acceleration of a geodesic is G times a small matrix plus its velocity times another, so a
geodesic from G with velocity ξ never leaves the span of the two: G(t) = G a(t) + ξ b(t) with a, b of size d x d.
Everything that happens along it is decided by the Gram matrices of (G, ξ), which are d x d as well; the tall
matrices enter only through them and through the end point.

Where no closed form is known the way is integrated (:mod:`hf_geosharp.geometry.integration`). Small matrices are
float64 or complex128, whatever the dtype of the weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

Pairwise = tuple[Tensor, Tensor]
"""The same thing for the factor G and the factor H."""

TOLERANCE = {torch.float32: 1e-7, torch.complex64: 1e-7, torch.float64: 1e-10, torch.complex128: 1e-10}
"""Error of the end point of an integrated geodesic, by the dtype of the weights."""


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


@dataclass(frozen=True)
class Equation:
    """A geodesic equation: G̈ = [G, Ġ] x, where x depends on the Gram matrices of G and Ġ alone.

    With S = GᴴG, R = ĠᴴG + GᴴĠ and N = ĠᴴĠ of both factors, (..., 2, copies, d, d), x (..., 2, copies, 2d, d) is
    ``arrange``, of ± (S + δ)⁻¹ [N, -R]. ``collect`` is its inverse, and its adjoint.
    """

    sign: float
    arrange: Callable[[Tensor], Tensor]
    collect: Callable[[Tensor], Tensor]


INV = Equation(-1.0, lambda x: torch.cat(x.chunk(2, dim=-1), dim=-2), lambda x: torch.cat(x.chunk(2, dim=-2), dim=-1))
"""Of the metric tr((S + δ)⁻¹ ξᴴζ) of each factor: G̈ = Ġ M R - G M N with M = (S + δ)⁻¹."""


def _crossed(x: Tensor) -> Tensor:
    return x.mH.flip(-4)


MIX = Equation(1.0, _crossed, _crossed)
"""Of the metric tr((T + δ) ξ_Gᴴζ_G) + tr((S + δ) ξ_Hᴴζ_H): G̈ = (G N - Ġ R) (T + δ)⁻¹, with N, R and T of H.

N, R and T are Hermitian: the adjoint of what a solver from the left gives is what is needed.
"""


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


def _eye_like(x: Tensor) -> Tensor:
    return torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
