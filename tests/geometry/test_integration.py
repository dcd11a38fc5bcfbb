"""The integration of geodesics, against the closed form of inv, finite differences and copies by themselves."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_geosharp.geometry import integration
from hf_geosharp.geometry.gauge import canonical
from hf_geosharp.geometry.geodesics import INV, MIX, Equation, Grams, inv_exact
from hf_geosharp.geometry.integration import FIRST, PARTS, EndlessError, Step, Taken, integrate, walk

EQUATIONS = pytest.mark.parametrize("equation", [pytest.param(INV, id="inv"), pytest.param(MIX, id="mix")])
COMPLEX = pytest.mark.parametrize("complex_", [False, True])
D = 3


def randn(*shape: int, seed: int, complex_: bool = False) -> Tensor:
    dtype = torch.complex128 if complex_ else torch.float64
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gram_of(g: Tensor, xi: Tensor) -> Tensor:
    basis = torch.cat([g, xi], dim=-1)
    return basis.mH @ basis


def grams_of(*scales: float, complex_: bool = False) -> tuple[Tensor, Tensor]:
    """Gram matrices and shifts of as many copies of a pair, their velocities scaled by these."""
    g, h = (x.expand(len(scales), -1, -1) for x in (randn(7, D, seed=i, complex_=complex_) for i in (0, 1)))
    base = canonical(g, h)
    factor = torch.tensor(scales, dtype=torch.float64).view(-1, 1, 1)
    made = [
        gram_of(q * base.s.sqrt().unsqueeze(-2), factor * randn(1, 7, D, seed=2 + i, complex_=complex_))
        for i, q in enumerate((base.frame_g, base.frame_h))
    ]
    return torch.stack(made), torch.zeros_like(base.s)


@COMPLEX
def test_it_is_of_order_eight(complex_: bool) -> None:
    """Against the closed form of inv, which nothing integrates."""
    gram, shift = grams_of(1.0, 0.3, complex_=complex_)
    factors = [Grams(x[:, :D, :D].diagonal(dim1=-2, dim2=-1).real, x[:, D:, :D], x[:, D:, D:]) for x in gram]
    exact = torch.stack([inv_exact(x) for x in factors])

    def error(steps: int) -> float:
        z = torch.eye(2 * D, dtype=gram.dtype).expand_as(gram)
        for _ in range(steps):
            z = Step(INV, gram, z, shift, torch.full((2,), 1 / steps, dtype=torch.float64)).end
        return float((z[..., :D] - exact).abs().max())

    assert 2**7 < error(4) / error(8) < 2**9.5
    for tolerance in (1e-4, 1e-7, 1e-10):
        assert float((integrate(INV, gram, shift, tolerance) - exact).abs().max()) < 30 * tolerance


@pytest.mark.parametrize("numbers", [PARTS, *(numbers for numbers, _, _ in FIRST)], ids=str)
@COMPLEX
@EQUATIONS
def test_the_derivative_is_that_of_finite_differences(
    equation: Equation, complex_: bool, numbers: tuple[int, ...]
) -> None:
    """Of steps of fixed lengths, with a shift, in directions that keep Gram matrices Hermitian."""
    gram, shift = grams_of(0.2, 0.05, complex_=complex_)
    shift = shift + torch.tensor([[0.0], [0.3]], dtype=torch.float64)
    weight = randn(2, 2, 2 * D, 2 * D, seed=9, complex_=complex_)
    z = torch.eye(2 * D, dtype=gram.dtype) + 0.1 * randn(2, 2, 2 * D, 2 * D, seed=8, complex_=complex_)
    length = torch.tensor([0.7, 1.0], dtype=torch.float64)
    of_gram, of_z = Step(equation, gram, z, shift, length, numbers).pullback(weight)
    for seed in range(4):
        x, y = (randn(*gram.shape, seed=20 + 2 * seed + i, complex_=complex_) for i in (0, 1))
        x = gram @ (x + x.mH) @ gram
        ends = [Step(equation, gram + t * x, z + t * y, shift, length, numbers).end for t in (1e-5, -1e-5)]
        measured = ((ends[0] - ends[1]).conj() * weight).real.sum() / 2e-5
        expected = ((of_gram.conj() * x).real.sum() + (of_z.conj() * y).real.sum()).item()
        assert measured.item() == pytest.approx(expected, rel=1e-6)


@EQUATIONS
def test_the_way_back_is_that_of_the_whole_way(equation: Equation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against finite differences of end points that are integrated much more closely; kept steps or not."""
    gram, shift = grams_of(0.3, 0.05)
    weight = randn(2, 2, 2 * D, D, seed=9)
    found = []
    for room in (integration.KEPT, 0):
        monkeypatch.setattr(integration, "KEPT", room)
        leaf = gram.clone().requires_grad_()
        end = integrate(equation, leaf, shift, 1e-12)
        found += torch.autograd.grad(end, leaf, weight, retain_graph=True)
        assert torch.equal(*(torch.autograd.grad(end, leaf, weight, retain_graph=True)[0] for _ in range(2)))
    assert float((found[0] - found[1]).abs().max()) < 1e-12 * float(found[0].abs().max())
    direction = randn(*gram.shape, seed=10)
    direction = gram @ (direction + direction.mH) @ gram
    direction /= direction.abs().max()
    ends = [integrate(equation, gram + t * direction, shift, 1e-12) for t in (1e-4, -1e-4)]
    measured = float(((ends[0] - ends[1]) * weight).sum() / 2e-4)
    assert measured == pytest.approx(float((found[0] * direction).sum()), rel=1e-5)


@EQUATIONS
def test_each_copy_takes_its_own_steps(equation: Equation, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy ends where it does alone, and so does its derivative, however many are integrated at once."""
    scales = (0.01, 0.5, 0.0, 0.1)
    gram, shift = grams_of(*scales)
    weight = randn(2, len(scales), 2 * D, D, seed=9)

    def both(copies: list[int]) -> tuple[Tensor, Tensor]:
        leaf = gram[:, copies].requires_grad_()
        end = integrate(equation, leaf, shift[copies], 1e-9)
        return end.detach(), torch.autograd.grad(end, leaf, weight[:, copies])[0]

    def steps(copies: list[int]) -> list[Taken]:
        return walk(equation, gram[:, copies], torch.ones(2, len(copies)).double(), shift[copies], 1e-9)[1]

    everyone = list(range(len(scales)))
    together = both(everyone)
    alone = [both([i]) for i in everyone]
    for x, y in zip(together, (torch.cat(found, dim=1) for found in zip(*alone, strict=True)), strict=True):
        assert float((x - y).abs().max()) < 1e-12 * float(y.abs().max())
    counts = [len(steps([i])) for i in everyone]
    assert counts == [sum(int((taken.copies == i).sum()) for taken in steps(everyone)) for i in everyone]
    assert len(set(counts)) > 1
    monkeypatch.setattr(integration, "ROOM", 1)
    for x, y in zip(together, both(everyone), strict=True):
        assert float((x - y).abs().max()) < 1e-12 * float(y.abs().max())


@EQUATIONS
@pytest.mark.parametrize("tolerance", [1e-7, 1e-10])
def test_fewer_parts_are_as_close_where_they_are_enough(equation: Equation, tolerance: float) -> None:
    """Slow copies take their whole way in one short step, others in longer ones, all as close to the limit."""
    scales = (1e-4, 1e-3, 5e-3, 1e-2, 3e-2, 0.1, 0.3)
    gram, shift = grams_of(*scales)
    speed = torch.tensor([scales, scales], dtype=torch.float64)
    scale = torch.stack([torch.ones_like(speed), 1 / speed], dim=-1).repeat_interleave(D, dim=-1).unsqueeze(-1)
    z, steps = walk(equation, scale * gram * scale.mT, speed, shift, tolerance)
    close, _ = walk(equation, scale * gram * scale.mT, speed, shift, 1e-2 * tolerance)
    assert {taken.parts for taken in steps} == {(2, 4), (2, 4, 6), PARTS}
    assert float((z - close)[..., :D].abs().max()) < tolerance


def test_steps_are_kept_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    gram, shift = grams_of(0.5, 0.5)

    def kept() -> list[bool]:
        return [taken.step is not None for taken in walk(MIX, gram, torch.ones(2, 2).double(), shift, 1e-10)[1]]

    assert len(kept()) > 3
    assert all(kept())
    monkeypatch.setattr(integration, "KEPT", 0)
    assert not any(kept())


def test_pairs_that_move_by_many_times_their_size_are_followed() -> None:
    """Far away from them, in mix, it makes no difference how small they were: sizes are in proportion to velocities."""
    sizes = []
    for speed in (1e4, 1e6):
        gram, shift = grams_of(speed)
        end = integrate(MIX, gram, shift, 1e-9)
        sizes.append((end.mH @ gram @ end).diagonal(dim1=-2, dim2=-1).sum(-1) / speed)
    assert float((sizes[0] / sizes[1] - 1).abs().max()) < 1e-4


def broken(factor: int) -> Equation:
    """One of which nothing of a factor is a number."""

    def arrange(x: Tensor) -> Tensor:
        x = INV.arrange(x).clone()
        x[..., factor, :, :, :] = math.nan
        return x

    return Equation(INV.sign, arrange, INV.collect)


@pytest.mark.parametrize("factor", [0, 1])
def test_a_factor_that_is_no_number_agrees_with_nothing(factor: int) -> None:
    """The other one may have settled long before."""
    with pytest.raises(EndlessError, match=r"of copies 0, 1 was not found beyond 0\.0% of its length"):
        integrate(broken(factor), *grams_of(0.1, 0.2), 1e-9)


@EQUATIONS
def test_a_factor_without_rank_has_no_geodesic(equation: Equation) -> None:
    gram, shift = grams_of(0.1)
    with pytest.raises(EndlessError, match="of copy 0 was not found"):
        integrate(equation, torch.zeros_like(gram), shift, 1e-9)


def test_where_too_many_steps_are_needed_it_is_told_of_which_copies_and_how_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gram, shift = grams_of(1e-3, 2.0, 1e-3, 1e-3, 2.0)
    monkeypatch.setattr(integration, "MOST", 6)
    # Two at a time.
    monkeypatch.setattr(integration, "ROOM", 2 * integration._numbers(D))
    with pytest.raises(EndlessError) as caught:
        integrate(MIX, gram, shift, 1e-10)
    assert caught.value.copies == (1,)
    assert 0 < caught.value.share < 1
    with pytest.raises(EndlessError) as caught:
        integrate(MIX, gram[:, [0, 2, 3, 4]], shift[[0, 2, 3, 4]], 1e-10)
    assert caught.value.copies == (3,)
