"""The canonical gauge of a pair (G, H): the balanced representative of its orbit.

A pair enters a function only through the product G Hᴴ, so every A in GL(d) acts on it without effect:
(G, H) -> (G A⁻¹, H Aᴴ) (arXiv 2505.05409, definition 3.1). Each orbit has a representative with
G*ᴴ G* = H*ᴴ H* = diag(s), s the singular values of G Hᴴ; it has the least ‖G‖² + ‖H‖² of its orbit.

All tensors are batched over copies (heads of all layers) in their first dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

CUTOFF = 1e-6
"""Singular value, relative to a product's largest, of a direction that counts in no rank: neither in a score nor in the
health of a head. In double precision too: weights are mostly stored in single precision, and what rounding them has
made is no direction in which mix may go far."""

_CUTOFF = {torch.float32: 1e-6, torch.complex64: 1e-6, torch.float64: 1e-12, torch.complex128: 1e-12}


@dataclass(frozen=True)
class Canonical:
    """Canonical representatives of a batch of pairs, in float64 or complex128.

    Attributes:
        frame_g: (copies, N, d), orthonormal columns; zero columns where the pair has no such direction.
        frame_h: (copies, M, d), likewise.
        s: (copies, d) real, descending singular values of G Hᴴ; zero where left out.
        transform: (copies, d, d), the A with G = G* A and H = H* A⁻ᴴ.
        inverse: (copies, d, d), its inverse (on the directions that are kept).
    """

    frame_g: Tensor
    frame_h: Tensor
    s: Tensor
    transform: Tensor
    inverse: Tensor

    @property
    def kept(self) -> Tensor:
        """(copies, d) bool: the directions that the pair really has."""
        return self.s > 0

    @property
    def rank(self) -> Tensor:
        """(copies,) number of directions kept."""
        return self.kept.sum(-1)

    @property
    def g(self) -> Tensor:
        """(copies, N, d): the factor G*."""
        return self.frame_g * self.s.sqrt().unsqueeze(-2)

    @property
    def h(self) -> Tensor:
        """(copies, M, d): the factor H*."""
        return self.frame_h * self.s.sqrt().unsqueeze(-2)


def canonical(
    g: Tensor, h: Tensor, *, cutoff: float | None = None, rank: Tensor | None = None, positive: bool = False
) -> Canonical:
    """The canonical representative of each pair of a batch.

    Thin QR of both factors, then the SVD of the small core; for d = 1 this is one division. What the balanced form
    leaves free (a sign or phase per column) is fixed: the entry of largest modulus in each column of G* is real and
    positive. Directions with s_j <= cutoff * max(s) are left out.

    Args:
        g: (copies, N, d), real or complex; computed in double precision whatever its dtype.
        h: (copies, M, d).
        cutoff: relative cut-off for s; by default 1e-6 for single and 1e-12 for double precision input.
        rank: (copies,), how many directions each pair keeps, if that is known; then the cut-off says nothing.
        positive: for d = 1, move by positive numbers only; signs stay.

    Raises:
        ValueError: the shapes do not belong to one pair, or an entry is not finite.
    """
    if g.ndim != 3 or h.ndim != 3 or g.shape[0] != h.shape[0] or g.shape[2] != h.shape[2]:
        raise ValueError(f"a pair is (copies, N, d) and (copies, M, d); got {tuple(g.shape)} and {tuple(h.shape)}")
    cutoff = _CUTOFF.get(g.dtype, 1e-6) if cutoff is None else cutoff
    wide = torch.complex128 if g.is_complex() else torch.float64
    g, h = g.to(wide), h.to(wide)
    if not bool(torch.isfinite(g).all() and torch.isfinite(h).all()):
        raise ValueError("a factor has NaN or infinite entries")
    if g.shape[2] == 1:
        return _canonical_column(g, h, positive)
    d = g.shape[2]
    q_g, r_g = torch.linalg.qr(g)
    q_h, r_h = torch.linalg.qr(h)
    u, s, vh = torch.linalg.svd(r_g @ r_h.mH, full_matrices=False)
    frame_g, frame_h = q_g @ u, q_h @ vh.mH
    left, right = u.mH @ r_g, vh @ r_h
    if s.shape[-1] < d:  # a factor with fewer rows than columns
        pad = d - s.shape[-1]
        s = torch.nn.functional.pad(s, (0, pad))
        frame_g, frame_h = (torch.nn.functional.pad(x, (0, pad)) for x in (frame_g, frame_h))
        left, right = (torch.nn.functional.pad(x, (0, 0, 0, pad)) for x in (left, right))
    keep = kept(s, cutoff, rank)
    s = torch.where(keep, s, 0.0)
    phase = leading_phase(frame_g)
    frame_g = frame_g * (phase * keep).unsqueeze(-2)
    frame_h = frame_h * (phase * keep).unsqueeze(-2)
    scale = torch.where(keep, s, 1.0).rsqrt() * keep
    # G = G* A with A = Σ^-½ Uᴴ R_G; A⁻¹ = R_Hᴴ V Σ^-½. Both turned by the same phases.
    transform = (scale * phase.conj()).unsqueeze(-1) * left
    inverse = right.mH * (scale * phase).unsqueeze(-2)
    return Canonical(frame_g, frame_h, s, transform, inverse)


def kept(s: Tensor, cutoff: float, rank: Tensor | None = None) -> Tensor:
    """Which of the singular values (copies, d), descending, count: those above the cut-off, or the first ``rank``."""
    there = s > torch.finfo(s.dtype).tiny
    if rank is None:
        return there & (s > cutoff * s[..., :1])
    return there & (torch.arange(s.shape[-1], device=s.device) < rank.unsqueeze(-1))


def _canonical_column(g: Tensor, h: Tensor, positive: bool) -> Canonical:
    """One column each: both get the norm √s, and the phase that makes the largest entry of G positive."""
    norm_g, norm_h = torch.linalg.vector_norm(g, dim=-2), torch.linalg.vector_norm(h, dim=-2)
    s = norm_g * norm_h
    keep = s > torch.finfo(s.dtype).tiny
    safe_g, safe_h = torch.where(keep, norm_g, 1.0), torch.where(keep, norm_h, 1.0)
    phase = (torch.ones_like(leading_phase(g)) if positive else leading_phase(g)) * keep
    frame_g = g * (phase / safe_g).unsqueeze(-2)
    frame_h = h * (phase / safe_h).unsqueeze(-2)
    ratio = (safe_g / safe_h).sqrt()
    transform = (phase.conj() * ratio).unsqueeze(-1)
    inverse = (phase / ratio).unsqueeze(-1)
    return Canonical(frame_g, frame_h, torch.where(keep, s, 0.0), transform, inverse)


def leading_phase(x: Tensor) -> Tensor:
    """(copies, d): the unit number that turns the largest entry of each column of x (copies, N, d) real positive."""
    index = x.abs().argmax(dim=-2, keepdim=True)
    lead = x.gather(-2, index).squeeze(-2)
    size = lead.abs()
    return torch.where(size > 0, lead.conj() / torch.where(size > 0, size, 1.0), torch.ones_like(lead))


def act(g: Tensor, h: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """(G A⁻¹, H Aᴴ): the pair moved along its orbit by ``a`` (copies, d, d).

    The same map moves tangent vectors.
    """
    if a.shape[-1] == 1:  # numbers: as many as there are hidden units
        return g / a, h * a.conj()
    return torch.linalg.solve(a, g, left=False), h @ a.mH
