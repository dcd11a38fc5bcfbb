"""The metrics: inv and mix on pairs, adaptive and euclidean on loose parameters, behind one interface.

A metric at a point is used through a :class:`Frame`, an orthonormal frame of the tangent space there: tangent
vectors are given by coordinates u in which the metric is the plain Euclidean one, so that norms, balls, steps and
Gaussian directions need no further thought. Points and tangent vectors are tuples of tensors, batched over copies
in their first dimension: (G, H) for pairs, (θ,) for loose parameters.

=========  ==============================================  =====================================================
metric     inner product of ξ, ζ                           invariant under
=========  ==============================================  =====================================================
inv        tr(S⁻¹ ξ_Gᴴζ_G) + tr(T⁻¹ ξ_Hᴴζ_H)              GL(d); scale-free (arXiv 2505.05409, eq. 12)
mix        tr(T ξ_Gᴴζ_G) + tr(S ξ_Hᴴζ_H)                  GL(d); absolute (eq. 13)
adaptive   Σ ξζ / θ²                                       scaling of single entries
euclidean  Σ ξζ                                            nothing but isometries
=========  ==============================================  =====================================================
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor

from hf_geosharp.geometry import geodesics
from hf_geosharp.geometry.gauge import Canonical, act, canonical, kept, leading_phase
from hf_geosharp.geometry.geodesics import Grams, Pairwise
from hf_geosharp.geometry.integration import integrate

Order = Literal["first", "second", "exact"]

Tensors = tuple[Tensor, ...]
"""A point or a tangent vector."""


class Frame(ABC):
    """An orthonormal frame of the tangent space at one point.

    Coordinates u have the shapes of the point's tensors. Entries of u for directions that the point does not have
    (zero parameters in the adaptive metric, missing rank of a pair) stay zero: :meth:`gradient`, :meth:`horizontal`
    and :meth:`pullback` never return anything else there, and :meth:`clip` removes them from a random u.
    """

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """(copies,) each: how many directions a point has that may have fewer than its shapes say."""
        return ()

    @abstractmethod
    def vector(self, u: Tensors) -> Tensors:
        """The tangent vector ξ with coordinates u."""

    @abstractmethod
    def coordinates(self, xi: Tensors) -> Tensors:
        """The coordinates u of a tangent vector ξ."""

    @abstractmethod
    def gradient(self, covector: Tensors) -> Tensors:
        """Coordinates of the Riemannian gradient whose plain gradient (by autograd) is ``covector``."""

    @abstractmethod
    def horizontal(self, u: Tensors) -> Tensors:
        """The horizontal part of u: orthogonal projection along the directions that do not move the function."""

    @abstractmethod
    def clip(self, u: Tensors) -> Tensors:
        """u without the directions that the point does not have."""

    @abstractmethod
    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """The end point γ(1) of the geodesic that starts here with velocity u, in ``out`` if given."""

    @property
    @abstractmethod
    def dimension(self) -> int:
        """Dimension of the horizontal space over all copies (a complex direction counts twice)."""


class EndPoint(ABC):
    """γ_u(1), and the way back for gradients.

    ``velocity`` is what of u the way back needs, (u,) or nothing. Whoever can get u again may take it away meanwhile,
    and has to put it back before :meth:`pullback`.
    """

    point: Tensors
    velocity: Tensors = ()

    @abstractmethod
    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        """Coordinates of the gradient of u -> f(γ_u(1)), given the plain gradient of f at γ_u(1).

        With ``horizontal`` its horizontal part, which for pairs costs nothing more. In ``out`` if given, which for
        pairs must not overlap ``covector``.
        """


class Metric(ABC):
    """A metric, to be used at any point through general tangent vectors; see :class:`Frame` for the fast way."""

    name: str

    @abstractmethod
    def at(self, *point: Tensor, damping: float = 0.0) -> Frame:
        """The frame at a point."""

    def to_frame(self, point: Tensors, xi: Tensors) -> Tensors:
        """A tangent vector at ``point`` as a tangent vector at the frame's base point."""
        return xi

    def from_frame(self, point: Tensors, xi: Tensors) -> Tensors:
        """The inverse of :meth:`to_frame`; moves points as well."""
        return xi

    def covector_to_frame(self, point: Tensors, covector: Tensors) -> Tensors:
        """A plain gradient at ``point`` as one at the frame's base point."""
        return covector

    def inner(self, point: Tensors, xi: Tensors, zeta: Tensors) -> Tensor:
        """⟨ξ, ζ⟩ for each copy, (copies,)."""
        frame = self.at(*point)
        u, v = (frame.coordinates(self.to_frame(point, x)) for x in (xi, zeta))
        return torch.stack([(a.conj() * b).real.flatten(1).sum(1) for a, b in zip(u, v, strict=True)]).sum(0)

    def norm(self, point: Tensors, xi: Tensors) -> Tensor:
        """‖ξ‖ for each copy, (copies,)."""
        return self.inner(point, xi, xi).sqrt()

    def gradient(self, point: Tensors, covector: Tensors) -> Tensors:
        """The Riemannian gradient: ⟨gradient, ξ⟩ = Re Σ conj(covector) ξ for all ξ."""
        frame = self.at(*point)
        return self.from_frame(point, frame.vector(frame.gradient(self.covector_to_frame(point, covector))))

    def horizontal(self, point: Tensors, xi: Tensors) -> Tensors:
        """The horizontal part of ξ."""
        frame = self.at(*point)
        u = frame.horizontal(frame.coordinates(self.to_frame(point, xi)))
        return self.from_frame(point, frame.vector(u))

    def geodesic(self, point: Tensors, xi: Tensors, order: Order = "exact") -> Tensors:
        """γ(1) for the geodesic from ``point`` with velocity ξ."""
        frame = self.at(*point)
        return self.from_frame(point, frame.geodesic(frame.coordinates(self.to_frame(point, xi)), order).point)


# --------------------------------------------------------------------------------------------------------- pairs


class PairMetric(Metric):
    """A GL(d)-invariant metric on pairs (G, H), real or complex."""

    equation: geodesics.Equation
    """Of its geodesics."""

    def at(self, *point: Tensor, damping: float = 0.0) -> PairFrame:
        """The frame at the canonical representative of (G, H), in the dtype of G."""
        return self.frame(canonical(*point), point[0].dtype, damping=damping)

    def frame(self, base: Canonical, dtype: torch.dtype, *, damping: float = 0.0) -> PairFrame:
        """The frame at a canonical representative, with tall matrices in ``dtype``.

        ``damping`` ε replaces S and T by S + ε · mean(s), in the canonical gauge and so equally for all
        representatives of an orbit.
        """
        return PairFrame(self, base, dtype, damping)

    def to_frame(self, point: Tensors, xi: Tensors) -> Tensors:
        """Into the canonical gauge."""
        return act(xi[0], xi[1], canonical(point[0], point[1]).transform.to(xi[0].dtype))

    def from_frame(self, point: Tensors, xi: Tensors) -> Tensors:
        """From the canonical gauge back to that of ``point``."""
        return act(xi[0], xi[1], canonical(point[0], point[1]).inverse.to(xi[0].dtype))

    def covector_to_frame(self, point: Tensors, covector: Tensors) -> Tensors:
        """Gradients move with the inverse adjoint: (∇_G Aᴴ, ∇_H A⁻¹)."""
        base = canonical(*point)
        return covector[0] @ base.transform.mH.to(covector[0].dtype), covector[1] @ base.inverse.to(covector[0].dtype)

    @abstractmethod
    def weight(self, e: Tensor) -> Tensor:
        """(copies, d): the factor w with ξ = u w, given the damped s."""

    @abstractmethod
    def vertical(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The X of the horizontal projection ξ_G + G Xᴴ, ξ_H - H X in the canonical gauge.

        With p = ξ_Gᴴ G and q = Hᴴ ξ_H (copies, d, d) it is (c ∘ q - c' ∘ p) / c''.

        Args:
            s: (copies, d); e: the damped s.

        Returns:
            c, c' and c'', each broadcastable to (copies, d, d).
        """

    @abstractmethod
    def second(self, s: Tensor, w: Tensor, shift: Tensor) -> geodesics.SecondOrder:
        """The second-order end point."""

    def exact(self, g: Grams, h: Grams, shift: Tensor, tolerance: float) -> Tensor:
        """Coefficients of the exact end point; integrated with its own error control unless a closed form is known."""
        return integrate(self.equation, torch.stack([g.full(), h.full()]), shift, tolerance)


class Inv(PairMetric):
    """tr(S⁻¹ ξ_Gᴴζ_G) + tr(T⁻¹ ξ_Hᴴζ_H): relative change of each factor."""

    name = "inv"
    equation = geodesics.INV

    def weight(self, e: Tensor) -> Tensor:
        """ξ = u √s."""
        return e.sqrt()

    def vertical(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X_ij = (q_ij e_i - p_ij e_j) / (s_i e_i + s_j e_j); the paper's printed equation is another one."""
        weighted = s * e
        return e.unsqueeze(-1), e.unsqueeze(-2), weighted.unsqueeze(-1) + weighted.unsqueeze(-2)

    def second(self, s: Tensor, w: Tensor, shift: Tensor) -> geodesics.SecondOrder:
        """Each factor on its own."""
        return geodesics.inv_second(s, w, shift)

    def exact(self, g: Grams, h: Grams, shift: Tensor, tolerance: float) -> Tensor:
        """In closed form; integrated only when damped."""
        if bool((shift[g.s > 0] > 0).any()):
            return super().exact(g, h, shift, tolerance)
        return torch.stack([geodesics.inv_exact(g), geodesics.inv_exact(h)])


class Mix(PairMetric):
    """tr(T ξ_Gᴴζ_G) + tr(S ξ_Hᴴζ_H): absolute change of the product G Hᴴ."""

    name = "mix"
    equation = geodesics.MIX

    def weight(self, e: Tensor) -> Tensor:
        """ξ = u / √s."""
        return torch.where(e > 0, e, 1.0).rsqrt() * (e > 0)

    def vertical(self, s: Tensor, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """X_ij = (q_ij e_j - e_i p_ij) / (e_i s_j + s_i e_j)."""
        row, column = (s.unsqueeze(-1), e.unsqueeze(-1)), (s.unsqueeze(-2), e.unsqueeze(-2))
        return column[1], row[1], row[1] * column[0] + row[0] * column[1]

    def second(self, s: Tensor, w: Tensor, shift: Tensor) -> geodesics.SecondOrder:
        """The factors drive each other."""
        return geodesics.mix_second(s, w, shift)


class PairFrame(Frame):
    """The frame of inv or mix at a canonical representative.

    What depends on the representative alone is worked out in double precision, exact geodesics are, too. All else runs
    in ``dtype``: products of tall matrices have no more digits than that.
    """

    def __init__(self, metric: PairMetric, base: Canonical, dtype: torch.dtype, damping: float = 0.0) -> None:
        self.metric = metric
        # Kept as (copies, d, rows), like the coordinates of a Space: the tall products then run on whole rows.
        self.q: Pairwise = (_row_major(base.frame_g, dtype), _row_major(base.frame_h, dtype))
        self.s = base.s
        self.kept = base.kept
        mean = base.s.sum(-1, keepdim=True) / base.rank.clamp(min=1).unsqueeze(-1)
        self.shift = torch.where(self.kept, damping * mean, 1.0)
        self.e = torch.where(self.kept, base.s + damping * mean, 0.0)
        self.w = metric.weight(self.e)
        self.root = self.s.sqrt()
        self._back = torch.where(self.kept, 1 / torch.where(self.kept, self.w, 1.0), 0.0)
        # What meets p and q in the projection of coordinates: p = w ∘ (QᴴU_G)ᴴ ∘ root, q = root ∘ QᴴU_H ∘ w.
        of_q, of_p, divisor = metric.vertical(self.s, self.e)
        there = self.kept.unsqueeze(-1) & self.kept.unsqueeze(-2)
        share = torch.where(there, 1 / torch.where(there, divisor, 1.0), 0.0)
        projection = (
            share * of_q * self.root.unsqueeze(-1) * self.w.unsqueeze(-2),
            share * of_p * self.w.unsqueeze(-1) * self.root.unsqueeze(-2),
            self.root.unsqueeze(-1) * self._back.unsqueeze(-2),
        )
        second = metric.second(self.s, self.w, self.shift)
        # Pairs that are almost zero have factors that single precision does not hold.
        largest = max(float(x.abs().max()) for x in (*projection, *second.factors) if x.numel())
        fits = largest <= torch.finfo(dtype).max
        self._small = dtype if fits else torch.promote_types(dtype, torch.float64)
        """The dtype of d x d matrices."""
        self._of_q, self._of_p, self._outward = (x.to(self._small.to_real()) for x in projection)
        self.second = second.to(self._small.to_real())

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """(copies,): how many directions each pair has."""
        return (self.kept.sum(-1),)

    @property
    def copies(self) -> int:
        """Number of pairs in the batch."""
        return self.s.shape[0]

    @property
    def dimension(self) -> int:
        """(N + M) r - r² for each pair of rank r, twice that if complex."""
        rank = self.kept.sum(-1)
        rows = self.q[0].shape[-2] + self.q[1].shape[-2]
        return int((rows * rank - rank * rank).sum()) * (2 if self.q[0].is_complex() else 1)

    def vector(self, u: Tensors) -> Tensors:
        """ξ = u w, column by column."""
        return tuple(x * self.w.unsqueeze(-2).to(x.dtype) for x in u)

    def coordinates(self, xi: Tensors) -> Tensors:
        """u = ξ / w."""
        return tuple(x * self._back.unsqueeze(-2).to(x.dtype) for x in xi)

    def gradient(self, covector: Tensors) -> Tensors:
        """The frame is orthonormal: coordinates are the derivatives along it."""
        return self.vector(covector)

    def clip(self, u: Tensors) -> Tensors:
        """Zero in the columns that the pair does not have."""
        return tuple(x * self.kept.unsqueeze(-2).to(x.dtype) for x in u)

    def horizontal(self, u: Tensors) -> Tensors:
        """Removes the vertical part, (-G Λ, H Λᴴ)."""
        x = self._vertical(self.products(self.q, u))
        z = self._outward * x.mH, -self._outward * x
        return tuple(x + q @ c.to(x.dtype) for x, q, c in zip(u, self.q, z, strict=True))

    def _vertical(self, p: Tensor) -> Tensor:
        """The X of the projection u_G + Q (outward ∘ Xᴴ), u_H - Q (outward ∘ X), given QᴴU (2, copies, d, d)."""
        return (self._of_q * p[1]).sub_(self._of_p * p[0].mH)

    def products(self, left: Tensors, right: Tensors) -> Tensor:
        """LᴴR of both factors, (2, copies, d, d)."""
        return torch.stack([x.mH @ y for x, y in zip(left, right, strict=True)]).to(self._small)

    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """G(1) and H(1) in the canonical gauge, of the given order."""
        if order == "first":
            return StraightEnd(self, cast(Pairwise, u), out)
        return PairEndPoint(self, cast(Pairwise, u), order, out)

    def expand(self, k: Tensor, n: Tensor, order: Order, tolerance: float) -> Expansion:
        """Coefficients of curved end points Q α + u β for K = uᴴQ and W = uᴴu of both factors, and their adjoint."""
        if order == "second":
            return Expansion(*self.second.coefficients(k, n), self.second.pullback)
        return self._exact(k, n, tolerance)

    def _exact(self, k: Tensor, n: Tensor, tolerance: float) -> Expansion:
        """By a graph of d x d matrices in double precision."""
        small, wide = k.dtype, torch.promote_types(k.dtype, torch.float64)
        k, n = (x.detach().to(wide).requires_grad_() for x in (k, n))
        root, w = self.root.to(k.dtype).unsqueeze(-1), self.w.to(k.dtype).unsqueeze(-1)
        with torch.enable_grad():
            g, h = (Grams(self.s, w * k[i] * root.mT, w * n[i] * w.mT) for i in (0, 1))
            end = self.metric.exact(g, h, self.shift, tolerance)
            d = root.shape[-2]
            outputs = root * end[..., :d, :], w * end[..., d:, :]

        def back(alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
            bars = torch.autograd.grad(outputs, (k, n), (alpha.to(wide), beta.to(wide)), retain_graph=True)
            return bars[0].to(small), bars[1].to(small)

        return Expansion(outputs[0].detach().to(small), outputs[1].detach().to(small), back)


class FactorFrame(PairFrame):
    """The frame where only isometries are left of GL(d): each factor by itself, in the inv metric, with no gauge.

    inv is invariant under all of GL(d) acting on one factor, so a basis in which that factor is orthonormal is as good
    as any: with G = Q R, everything happens at Q, and the end point goes back through R. Q has the left singular
    vectors, each with its largest entry real and positive, which are the same for all pairs of an orbit: random
    directions are drawn there. Nothing is projected away; the worst case does not need it.
    """

    def __init__(
        self, g: Tensor, h: Tensor, dtype: torch.dtype, *, cutoff: float, ranks: tuple[Tensor, ...] = ()
    ) -> None:
        """At (G, H), (copies, N, d) and (copies, M, d) in double precision; ``ranks`` of both, if they are known."""
        frames, self._through, self._mask = [], [], []
        for x, rank in zip((g, h), ranks or (None, None), strict=True):
            u, s, vh = torch.linalg.svd(x, full_matrices=False)
            if s.shape[-1] < x.shape[-1]:
                pad = x.shape[-1] - s.shape[-1]
                u, s = torch.nn.functional.pad(u, (0, pad)), torch.nn.functional.pad(s, (0, pad))
                vh = torch.nn.functional.pad(vh, (0, 0, 0, pad))
            mask = kept(s, cutoff, rank)
            phase = leading_phase(u)
            frames.append(u * (phase * mask).unsqueeze(-2))
            self._through.append(((s * phase.conj()).unsqueeze(-1) * vh).to(dtype))
            self._mask.append(mask)
        ones = torch.ones(g.shape[0], g.shape[-1], dtype=torch.float64, device=g.device)
        none = ones.new_empty(0)
        super().__init__(Inv(), Canonical(frames[0], frames[1], ones, none, none), dtype)

    @property
    def ranks(self) -> tuple[Tensor, ...]:
        """(copies,) of both factors."""
        return tuple(mask.sum(-1) for mask in self._mask)

    @property
    def dimension(self) -> int:
        """N times the rank of G and M times that of H, twice that if complex."""
        total = sum(q.shape[-2] * int(m.sum()) for q, m in zip(self.q, self._mask, strict=True))
        return total * (2 if self.q[0].is_complex() else 1)

    def clip(self, u: Tensors) -> Tensors:
        """Zero in the columns that a factor does not have."""
        return tuple(x * m.unsqueeze(-2).to(x.dtype) for x, m in zip(u, self._mask, strict=True))

    def horizontal(self, u: Tensors) -> Tensors:
        """All of u."""
        return u

    def _vertical(self, p: Tensor) -> Tensor:
        return torch.zeros_like(p[0])

    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """G(1) and H(1), of the given order."""
        return _FactorEnd(self, super().geodesic(self.clip(u), order), out)


class _FactorEnd(EndPoint):
    def __init__(self, frame: FactorFrame, inner: EndPoint, out: Tensors | None) -> None:
        self._frame, self._inner = frame, inner
        self.velocity = inner.velocity
        made = []
        for i, (x, r) in enumerate(zip(inner.point, frame._through, strict=True)):
            # Stored transposed, as the end points of pairs are.
            made.append(torch.bmm(r.mT, x.mT, out=None if out is None else out[i].mT).mT)
        self.point = tuple(made)
        inner.point = ()

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        self._inner.velocity = self._frame.clip(self.velocity) if self.velocity else ()
        back = tuple((r.conj() @ x.mT).mT for x, r in zip(covector, self._frame._through, strict=True))
        pulled = self._frame.clip(self._inner.pullback(back, horizontal=False))
        return pulled if out is None else tuple(o.copy_(p) for o, p in zip(out, pulled, strict=True))


@dataclass(frozen=True)
class Expansion:
    """α and β of both factors, (2, copies, d, d), and the map from their gradients to those in (K, W)."""

    alpha: Tensor
    beta: Tensor
    back: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class StraightEnd(EndPoint):
    """End point of a straight line of pairs, Q root + u w, column by column: to first order, and of all at u = 0.

    Q and u are (copies, rows, d), root (of S) and w (copies, d).
    """

    def __init__(self, frame: PairFrame, u: Pairwise, out: Tensors | None = None) -> None:
        self.frame = frame
        root, self._w = (x.to(frame.q[0].dtype).unsqueeze(-1) for x in (frame.root, frame.w))
        made = []
        for i, (q, x) in enumerate(zip(frame.q, u, strict=True)):
            end = torch.mul(q.mT, root, out=None if out is None else out[i].mT)
            made.append(end.addcmul_(x.mT, self._w).mT)
        self.point = tuple(made)

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        """Γ w, without its vertical part."""
        frame = self.frame
        places = out or tuple(x.new_empty(x.mT.shape).mT for x in covector)
        pulled = [torch.mul(x.mT, self._w, out=o.mT) for x, o in zip(covector, places, strict=True)]
        if horizontal:
            # As frame.horizontal, with QᴴU out of the covector.
            x = frame._vertical(frame.products(frame.q, covector) * self._w.mT)
            for result, q, c in zip(pulled, frame.q, (frame._outward * x.mH, -frame._outward * x), strict=True):
                result.baddbmm_(c.to(q.dtype).mT, q.mT)
        return tuple(x.mT for x in pulled)


class PairEndPoint(EndPoint):
    """End point of a geodesic of pairs, Q α + u β; α and β depend on u through K = uᴴQ and W = uᴴu alone."""

    def __init__(self, frame: PairFrame, u: Pairwise, order: Order, out: Tensors | None = None) -> None:
        self.frame, self.velocity = frame, u
        dtype = u[0].dtype
        self._k = frame.products(u, frame.q)
        expansion = frame.expand(self._k, frame.products(u, u), order, geodesics.TOLERANCE[dtype])
        self._beta, self._back = expansion.beta, expansion.back
        alpha, beta = expansion.alpha.to(dtype), expansion.beta.to(dtype)
        self.point = tuple(
            _combine(frame.q[i], alpha[i], u[i], beta[i], None if out is None else out[i]) for i in (0, 1)
        )

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        """Γ βᴴ + Q K̄ᴴ + u (W̄ + W̄ᴴ) for each factor."""
        frame = self.frame
        alpha = frame.products(frame.q, covector)
        k, n = self._back(alpha, frame.products(self.velocity, covector))
        along_q, along_u = k.mH.contiguous(), geodesics.hermitian(n)
        if horizontal:
            # QᴴU of the result, out of what is known already; its vertical part goes the way of K̄.
            flat = [x.flatten(0, 1) for x in (along_q, alpha, self._beta.mH)]
            inner = torch.baddbmm(flat[0], flat[1], flat[2])
            inner.baddbmm_(self._k.mH.flatten(0, 1), along_u.flatten(0, 1))
            x = frame._vertical(inner.view_as(alpha))
            along_q[0].addcmul_(frame._outward, x.mH)
            along_q[1].addcmul_(frame._outward, x, value=-1)
        dtype = self.velocity[0].dtype
        beta = self._beta.to(dtype)
        terms = ((frame.q, along_q.to(dtype)), (self.velocity, along_u.to(dtype)))
        pulled = []
        for i, gamma in enumerate(covector):
            result = torch.bmm(beta[i].conj(), gamma.mT, out=None if out is None else out[i].mT)
            for tall, small in terms:
                result.baddbmm_(small[i].mT, tall[i].mT)
            pulled.append(result.mT)
        return tuple(pulled)


def _row_major(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The same matrices (copies, rows, d) in ``dtype``, lying in memory as (copies, d, rows)."""
    return x.mT.to(dtype, memory_format=torch.contiguous_format).contiguous().mT


def _combine(q: Tensor, a: Tensor, u: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Q a + u b (copies, rows, d), computed and stored transposed."""
    result = torch.bmm(a.mT, q.mT, out=None if out is None else out.mT)
    return result.baddbmm_(b.mT, u.mT).mT


# -------------------------------------------------------------------------------------------------------- entries


@dataclass(frozen=True)
class _Curve:
    """How θ moves with its coordinate: θ value(u), with derivative θ derivative(u); None stands for 1."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor] | None


_ADAPTIVE_CURVES: dict[Order, _Curve] = {
    "first": _Curve(lambda u: 1 + u, None),
    "second": _Curve(lambda u: 1 + u + u * u / 2, lambda u: 1 + u),
    "exact": _Curve(torch.exp, torch.exp),
}


class Adaptive(Metric):
    """Σ ξ²/θ², entry by entry: adaptive sharpness (arXiv 2102.11600). An entry that is exactly zero cannot move."""

    name = "adaptive"

    def at(self, *point: Tensor, damping: float = 0.0) -> Frame:
        """The frame at (θ,), θ of shape (copies, n). No damping is needed."""
        return AdaptiveFrame(point[0])


class EntryFrame(Frame):
    """The frame of a metric on loose parameters: everything is horizontal.

    The base point is ``scale`` θ, so that a tensor can serve as the base point of slightly different ones.
    """

    def __init__(self, theta: Tensor, scale: float = 1.0) -> None:
        self.theta, self.scale = theta, scale

    def horizontal(self, u: Tensors) -> Tensors:
        """All of u."""
        return u


class AdaptiveFrame(EntryFrame):
    """ξ = θ u; geodesics are θ (1 + u), θ (1 + u + u²/2) and θ e^u."""

    @property
    def dimension(self) -> int:
        """Number of entries that are not zero."""
        return int(torch.count_nonzero(self.theta))

    def vector(self, u: Tensors) -> Tensors:
        """ξ = θ u."""
        return (self.scale * self.theta * u[0],)

    def coordinates(self, xi: Tensors) -> Tensors:
        """u = ξ / θ, zero where θ is."""
        there = self.theta != 0
        return (torch.where(there, xi[0] / torch.where(there, self.scale * self.theta, 1.0), 0.0),)

    def gradient(self, covector: Tensors) -> Tensors:
        """∂f/∂u = θ ∇."""
        return self.vector(covector)

    def clip(self, u: Tensors) -> Tensors:
        """Zero where θ is."""
        return (u[0] * (self.theta != 0),)

    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """θ times the factor of the order."""
        return _AdaptiveEnd(self, u[0], order, None if out is None else out[0])


class _AdaptiveEnd(EndPoint):
    def __init__(self, frame: AdaptiveFrame, u: Tensor, order: Order, out: Tensor | None) -> None:
        self._frame, self._curve = frame, _ADAPTIVE_CURVES[order]
        self.velocity = () if self._curve.derivative is None else (u,)
        if order == "first":
            point = torch.addcmul(frame.theta, frame.theta, u, out=out)
        else:
            point = torch.mul(frame.theta, self._curve.value(u), out=out)
        self.point = (point if frame.scale == 1.0 else point.mul_(frame.scale),)

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        pulled = torch.mul(covector[0], self._frame.theta, out=None if out is None else out[0])
        if self._curve.derivative is not None:
            pulled.mul_(self._curve.derivative(self.velocity[0]))
        return (pulled if self._frame.scale == 1.0 else pulled.mul_(self._frame.scale),)


class Euclidean(Metric):
    """Σ ξ²: plain l2 sharpness. Straight lines at every order."""

    name = "euclidean"

    def at(self, *point: Tensor, damping: float = 0.0) -> Frame:
        """The frame at (θ,), θ of shape (copies, n)."""
        return EuclideanFrame(point[0])


class EuclideanFrame(EntryFrame):
    """Coordinates are the tangent vectors themselves."""

    @property
    def dimension(self) -> int:
        """Number of entries."""
        return self.theta.numel()

    def vector(self, u: Tensors) -> Tensors:
        """ξ = u."""
        return u

    def coordinates(self, xi: Tensors) -> Tensors:
        """u = ξ."""
        return xi

    def gradient(self, covector: Tensors) -> Tensors:
        """The plain gradient."""
        return covector

    def clip(self, u: Tensors) -> Tensors:
        """Nothing is missing."""
        return u

    def geodesic(self, u: Tensors, order: Order, out: Tensors | None = None) -> EndPoint:
        """θ + u."""
        return _EuclideanEnd(torch.add(u[0], self.theta, alpha=self.scale, out=None if out is None else out[0]))


class _EuclideanEnd(EndPoint):
    def __init__(self, point: Tensor) -> None:
        self.point = (point,)

    def pullback(self, covector: Tensors, *, horizontal: bool = True, out: Tensors | None = None) -> Tensors:
        return covector if out is None else (out[0].copy_(covector[0]),)


PAIR_METRICS: dict[str, PairMetric] = {m.name: m for m in (Inv(), Mix())}
ENTRY_METRICS: dict[str, Metric] = {m.name: m for m in (Adaptive(), Euclidean())}
ENTRY_FRAMES: dict[str, type[EntryFrame]] = {"adaptive": AdaptiveFrame, "euclidean": EuclideanFrame}
METRICS: dict[str, Metric] = {**PAIR_METRICS, **ENTRY_METRICS}
