"""Geodesics of pairs by integration: end points in coefficient space, with their derivative written out.

A *state* holds all that matters at a time t, in two stacks of blocks, (..., 2, copies, 4d, d) each, of both factors:

    p = [GᴴG; ĠᴴG; a; b],    v = [GᴴĠ; ĠᴴĠ; ȧ; ḃ],    where G(t) = G(0) a + ξ b.

With G̈ = [G, Ġ] x (:class:`~hf_geosharp.geometry.geodesics.Equation`) and w = [p, v] x the state moves by

    ṗ = v + [ĠᴴG; w₁ᴴ; 0],    v̇ = w + [ĠᴴĠ; w₂ᴴ; 0],

w₁ and w₂ being the first two blocks of w: each Gram matrix changes on both sides. A step is made of midpoint rules of
several numbers of parts, side by side in the first dimension. The way back makes steps once more where there is no room
to keep them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from hf_geosharp.geometry.geodesics import Equation, hermitian

SHORTEST = 1e-13
"""Length of a step, as a share of the whole, below which none is tried that is shorter: its end is its start, nearly.

Pairs that are almost zero move by many times their size, and turn within a time as short as they are small.
"""

LEAST = 1 / 64
"""Share of the tolerance that a step may take up, however short it is; a longer one its length."""

MOST = 512
"""Steps of a copy, also those that were too long."""

LONGER, SHORTER, SAFE = 4.0, 0.2, 0.9
"""How many times as long as the last step the next one is at most, at least, and as a share of what errors allow."""

PARTS = (2, 4, 6, 8)
"""Numbers of parts of the midpoint rules that make a step, ascending."""

FIRST = (((2, 4), 3, 2.5), ((2, 4, 6), 5, 5.0))
"""Numbers of parts of a first step, which may be the whole way: where a power of the speed is so many tolerances."""

ROOM = 1 << 24
"""Numbers that a step may hold, about; more copies than it has room for are integrated part after part."""

KEPT = 1 << 20
"""Numbers of steps that are kept for the way back; there may be many stacks of pairs that wait for theirs."""


class EndlessError(ArithmeticError):
    """Exact geodesics were not found to their end: they leave the full-rank pairs first, or turn too often.

    Attributes:
        copies: those concerned.
        share: of its length, up to which the geodesic that was left earliest was found.
        where: names of the copies.
    """

    def __init__(self, copies: Sequence[int], share: float, where: str = "") -> None:
        """``where`` names the copies, if that is known."""
        self.copies, self.share = tuple(copies), share
        self.where = where or f"{'copy' if len(copies) == 1 else 'copies'} {', '.join(map(str, copies))}"
        super().__init__(f"the exact geodesic of {self.where} was not found beyond {share:.1%} of its length")


def integrate(equation: Equation, gram: Tensor, shift: Tensor, tolerance: float) -> Tensor:
    """Coefficients [a; b] (2, copies, 2d, d) at t = 1 of the geodesics of both factors, differentiable in ``gram``.

    Each copy takes steps as long as the tolerance allows it: the error of a step is at most its share of it, or
    :data:`LEAST`.

    Args:
        equation: that of the metric.
        gram: (2, copies, 2d, 2d), Gram matrices of [G, ξ], float64 or complex128.
        shift: (copies, d), the δ of the equation, and 1 where a pair has no direction.
        tolerance: the error of the end point, relative to its largest coefficient if that is above 1.

    Raises:
        EndlessError: a geodesic was not found up to t = 1: no step is short enough, or too many are needed.
    """
    d = shift.shape[-1]
    # In the basis [G, ξ / speed] of two matrices of one size coefficients tell how far a factor is from where it ends.
    squares = gram.detach().diagonal(dim1=-2, dim2=-1).real.unflatten(-1, (2, d)).sum(-1)
    speed = torch.where((squares > 0).all(-1), squares[..., 1] / squares[..., 0], 1.0).sqrt()
    scale = torch.stack([torch.ones_like(speed), 1 / speed], dim=-1).repeat_interleave(d, dim=-1).unsqueeze(-1)
    ends, together = [], max(1, ROOM // _numbers(d))
    pieces = (x.split(together, dim=1) for x in (scale * gram * scale.mT, speed, shift.unsqueeze(0)))
    for i, (some, speeds, shifts) in enumerate(zip(*pieces, strict=True)):
        try:
            end: Tensor = _Way.apply(some, equation, speeds, shifts[0], tolerance)  # type: ignore[no-untyped-call]
        except EndlessError as error:
            raise EndlessError([i * together + copy for copy in error.copies], error.share) from None
        ends.append(end)
    return scale * torch.cat(ends, dim=1)


def _numbers(d: int, parts: Sequence[int] = PARTS) -> int:
    """How many numbers a step holds of a copy: p, v and x of both factors at each evaluation."""
    return 20 * d * d * (1 + sum(number - 1 for number in parts))


class Taken(NamedTuple):
    """A step of the copies with these numbers, from z = [[a, ȧ], [b, ḃ]] (2, copies, 2d, 2d), each of its length."""

    copies: Tensor
    z: Tensor
    length: Tensor
    parts: tuple[int, ...]
    step: Step | None
    """Where it was kept."""


class _Way(torch.autograd.Function):
    """gram -> coefficients at t = 1, see :func:`integrate`."""

    @staticmethod
    def forward(ctx: Any, gram: Tensor, equation: Equation, speed: Tensor, shift: Tensor, tolerance: float) -> Tensor:
        ctx.equation, ctx.shift = equation, shift
        ctx.save_for_backward(gram)
        z, ctx.steps = walk(equation, gram, speed, shift, tolerance)
        return z[..., : shift.shape[-1]].contiguous()

    @staticmethod
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gram,) = ctx.saved_tensors
        back, ahead = torch.zeros_like(gram), torch.cat([outputs[0], torch.zeros_like(outputs[0])], dim=-1)
        for copies, z, length, parts, kept in reversed(ctx.steps):
            step = kept or Step(ctx.equation, gram[:, copies], z, ctx.shift[copies], length, parts)
            of_gram, ahead[:, copies] = step.pullback(ahead[:, copies])
            back[:, copies] += of_gram
        return back, None, None, None, None


def walk(
    equation: Equation, gram: Tensor, speed: Tensor, shift: Tensor, tolerance: float
) -> tuple[Tensor, list[Taken]]:
    """z (2, copies, 2d, 2d) at t = 1, and the steps that led there, from Gram matrices of [G, ξ / speed].

    ``speed`` is (2, copies); other arguments, and errors, are :func:`integrate`'s.
    """
    d = shift.shape[-1]
    z = torch.diag_embed(torch.stack([torch.ones_like(speed), speed], dim=-1).repeat_interleave(d, dim=-1))
    z, fastest = z.to(gram.dtype), speed.amax(0)
    length = torch.ones(gram.shape[1], dtype=torch.float64, device=gram.device)
    left, steps, room = length.clone(), list[Taken](), KEPT
    # Copies that hardly move get there in fewer parts.
    firsts, others = list[tuple[tuple[int, ...], Tensor]](), torch.ones_like(length, dtype=torch.bool)
    for numbers, power, most in FIRST:
        slow = others & (fastest**power <= most * tolerance)
        others &= ~slow
        if bool(slow.any()):
            firsts.append((numbers, slow.nonzero().squeeze(-1)))
    for attempt in range(MOST + 1):
        going = left.nonzero().squeeze(-1)
        if not going.numel():
            return z, steps
        if attempt == MOST:
            break
        parts, going = firsts.pop() if firsts else (PARTS, going)
        taken, start = torch.minimum(length[going], left[going]), z[:, going]
        step = Step(equation, gram[:, going], start, shift[going], taken, parts)
        share = step.error(fastest[going], left[going] - taken) / (taken.clamp_min(LEAST) * tolerance)
        arrived = share <= 1
        hopeless = ~arrived & ~(taken > SHORTEST)
        if bool(hopeless.any()):
            going = going[hopeless]
            break
        if parts is PARTS:
            length[going] = taken * _times(share)
        room -= len(going) * _numbers(d, parts)
        if bool(arrived.all()):
            steps.append(Taken(going, start, taken, parts, step if room > 0 else None))
            z[:, going] = step.end
        else:
            going, start, taken = going[arrived], start[:, arrived], taken[arrived]
            if going.numel():
                steps.append(Taken(going, start, taken, parts, None))
            z[:, going] = step.end[:, arrived]
        left[going] -= taken
    raise EndlessError(going.tolist(), float(1 - left[going].max()))


def _times(share: Tensor) -> Tensor:
    """How many times as long a step may be whose error is this share of what is allowed; the share goes by powers of 6.

    What is no number, or infinite, is too long by nobody knows how much.
    """
    return (SAFE * share ** (-1 / 6)).nan_to_num(SHORTER, LONGER, SHORTER).clamp(SHORTER, LONGER)


@dataclass(frozen=True)
class _Point:
    """A state on the way, and the x of the equation there."""

    p: Tensor
    v: Tensor
    x: Tensor


class Step:
    """A step of order 8 from z, and its error by one of order 6.

    They are what midpoint rules of :data:`PARTS` parts tend to (Gragg, *On extrapolation algorithms for ordinary
    initial value problems*, 1965; Bulirsch and Stoer, 1966), whose errors are series in the squares of the lengths of
    their parts; of order 6 without the first. With fewer numbers of parts (:data:`FIRST`) orders are less.

    Attributes:
        end: (2, copies, 2d, 2d), z after the step.
    """

    def __init__(
        self, equation: Equation, gram: Tensor, z: Tensor, shift: Tensor, length: Tensor,
        numbers: tuple[int, ...] = PARTS,
    ) -> None:  # fmt: skip
        """``gram`` and ``z`` are (2, copies, 2d, 2d), ``shift`` (copies, d), ``length`` (copies,)."""
        self._equation, self._gram, self._z, self._numbers = equation, gram, z, numbers
        self._shift = torch.diag_embed(shift).to(gram.dtype)
        self._d = shift.shape[-1]
        parts = torch.tensor(numbers, dtype=torch.float64, device=length.device)
        self._dt = (length / parts.unsqueeze(-1)).to(gram.dtype).view(len(numbers), 1, -1, 1, 1)
        ends = self._midpoints()
        self.end, self._other = _limit(ends, numbers), _limit(ends[1:], numbers[1:])

    def error(self, speed: Tensor, left: Tensor) -> Tensor:
        """(copies,), relative to a copy's largest coefficient where that is above 1; NaN where anything is.

        Of velocities either relative to the largest, where that is above ``speed``, or as far as coefficients move by
        them in what is ``left`` of the way; both (copies,).
        """
        size, apart = (x.abs().unflatten(-1, (2, self._d)).amax((0, 2, 4)) for x in (self.end, self.end - self._other))
        of_place, of_speed = apart.unbind(-1)
        here, there = size[:, 0].clamp_min(1.0), torch.maximum(size[:, 1], speed)
        of_speed = torch.minimum(of_speed / there, of_speed * left / here)
        # On some devices a maximum passes over what is no number; a sum does not.
        return torch.maximum(of_place / here, of_speed) + 0 * self.end.abs().sum((0, 2, 3))

    def _midpoints(self) -> list[Tensor]:
        """z after the step, by each number of parts."""
        d = self._d
        y = torch.cat([self._z.mH @ self._gram @ self._z, self._z], dim=-2)
        self._start = self._at(y[..., :d].contiguous(), y[..., d:].contiguous())
        p, v = self._moved(self._start.p, self._start.v, self._start, self._dt)
        before_p, before_v = self._start.p.expand_as(p), self._start.v.expand_as(v)
        self._points: list[_Point] = []
        ends = []
        for made in range(1, self._numbers[-1] + 1):
            if made in self._numbers:
                ends.append(torch.cat([p[0, ..., 2 * d :, :], v[0, ..., 2 * d :, :]], dim=-1))
                p, v, before_p, before_v = p[1:], v[1:], before_p[1:], before_v[1:]
            if len(p):
                point = self._at(p, v)
                self._points.append(point)
                moved = self._moved(before_p, before_v, point, 2 * self._dt[-len(p) :])
                before_p, before_v, (p, v) = p, v, moved
        return ends

    def _at(self, p: Tensor, v: Tensor) -> _Point:
        d = self._d
        right = torch.cat([v[..., d : 2 * d, :], -hermitian(p[..., d : 2 * d, :])], dim=-1)
        return _Point(p, v, self._equation.arrange(self._solved(p, right)))

    def _solved(self, p: Tensor, right: Tensor) -> Tensor:
        """± (S + δ)⁻¹ times that. Where S + δ is singular it is not finite: :func:`walk` takes a shorter step."""
        return self._equation.sign * torch.linalg.solve_ex(p[..., : self._d, :] + self._shift, right)[0]

    def _moved(self, p: Tensor, v: Tensor, at: _Point, dt: Tensor) -> tuple[Tensor, Tensor]:
        """p + ṗ dt and v + v̇ dt, with the derivatives at a point."""
        d = self._d
        w = _product(at.p, at.x[..., :d, :]).add_(_product(at.v, at.x[..., d:, :]))
        p, v = torch.addcmul(p, dt, at.v), torch.addcmul(v, dt, w)
        for moved, second, turned in ((p, at.p, w[..., :d, :]), (v, at.v, w[..., d : 2 * d, :])):
            moved[..., :d, :].addcmul_(dt, second[..., d : 2 * d, :])
            moved[..., d : 2 * d, :].addcmul_(dt, turned.mH)
        return p, v

    def pullback(self, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in ``gram`` and ``z`` from that in :attr:`end`, (2, copies, 2d, 2d) each."""
        d = self._d
        p, v = (
            torch.cat([torch.zeros_like(x), x], dim=-2).expand(len(self._numbers), -1, -1, -1, -1)
            for x in (ahead[..., :d], ahead[..., d:])
        )
        weights = torch.tensor(_weights(self._numbers), dtype=ahead.dtype, device=ahead.device).view(-1, 1, 1, 1, 1)
        # Gradients in the state after that at hand, and in that at hand as far as it is known, by numbers of parts.
        p, v = p * weights, v * weights
        here_p, here_v = torch.zeros_like(p), torch.zeros_like(v)
        for point in reversed(self._points):
            some = slice(len(self._numbers) - len(point.p), None)
            dt = 2 * self._dt[some]
            more_p, more_v = self._pulled(point, dt * p[some], dt * v[some])
            more_p += here_p[some]
            more_v += here_v[some]
            here_p[some], here_v[some], p[some], v[some] = p[some], v[some], more_p, more_v
        start_p, start_v = self._pulled(self._start, (self._dt * p).sum(0), (self._dt * v).sum(0))
        of = torch.cat([start_p + (here_p + p).sum(0), start_v + (here_v + v).sum(0)], dim=-1)
        of_gram, of_z = of[..., : 2 * d, :], of[..., 2 * d :, :]
        return self._z @ of_gram @ self._z.mH, of_z + self._gram @ self._z @ hermitian(of_gram)

    def _pulled(self, at: _Point, p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients in the state at a point from those in ṗ and v̇ there."""
        d = self._d
        first, second = slice(None, d), slice(d, 2 * d)
        w = v.clone()
        w[..., first, :] += p[..., second, :].mH
        w[..., second, :] += v[..., second, :].mH
        of_p, of_v = _product(w, at.x[..., :d, :].mH), _product(w, at.x[..., d:, :].mH).add_(p)
        of_p[..., second, :] += p[..., first, :]
        of_v[..., second, :] += v[..., first, :]
        of_x = torch.cat([_product(at.p.mH, w), _product(at.v.mH, w)], dim=-2)
        of_right = self._solved(at.p, self._equation.collect(of_x))
        solved = self._equation.collect(at.x)
        of_p[..., first, :] -= self._equation.sign * (of_right @ solved.mH)
        of_v[..., second, :] += of_right[..., :d]
        of_p[..., second, :] -= hermitian(of_right[..., d:])
        return of_p, of_v


def _product(x: Tensor, y: Tensor) -> Tensor:
    """x y, matrix by matrix."""
    return torch.bmm(x.flatten(0, -3), y.flatten(0, -3)).view(*x.shape[:-1], y.shape[-1])


def _weights(parts: Sequence[int]) -> list[float]:
    """What ends by so many parts count in the value at 0 of polynomials in 1/n² through them."""
    return [math.prod(n**2 / (n**2 - m**2) for m in parts if m != n) for n in parts]


def _limit(ends: Sequence[Tensor], parts: Sequence[int]) -> Tensor:
    """What ends by so many parts tend to as these get short."""
    return cast(Tensor, sum(weight * end for weight, end in zip(_weights(parts), ends, strict=True)))
