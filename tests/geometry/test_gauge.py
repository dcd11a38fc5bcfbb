"""The canonical gauge against its definition: same product, balanced, unique, and least on its orbit."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from hf_geosharp.geometry.gauge import act, canonical

COPIES = 4

EXACT = 1e-12
"""Relative error in double precision: QR and SVD of a few rows, times the condition 1e2 of what moved them."""


@dataclass(frozen=True)
class Case:
    """Sizes and field of a batch of pairs."""

    rows_g: int
    rows_h: int
    d: int
    complex: bool = False

    def __str__(self) -> str:
        return f"{self.rows_g}x{self.d}-{self.rows_h}x{self.d}{'-complex' if self.complex else ''}"

    @property
    def dtype(self) -> torch.dtype:
        return torch.complex128 if self.complex else torch.float64

    def pair(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        shapes = (COPIES, self.rows_g, self.d), (COPIES, self.rows_h, self.d)
        g, h = (torch.randn(s, generator=generator, dtype=self.dtype) for s in shapes)
        return g, h

    def element(self, seed: int = 1, condition: float = 1e2) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        u, _, vh = torch.linalg.svd(torch.randn(COPIES, self.d, self.d, generator=generator, dtype=self.dtype))
        scales = torch.logspace(-0.5, 0.5, self.d, base=condition, dtype=torch.float64)
        return (u * scales.to(self.dtype)) @ vh


TALL = [Case(9, 7, d, c) for d in (1, 2, 5) for c in (False, True)]
SHORT = [Case(3, 7, 5), Case(9, 4, 5), Case(3, 2, 5, True), Case(2, 2, 3)]
each_tall = pytest.mark.parametrize("case", TALL, ids=str)
each_case = pytest.mark.parametrize("case", [*TALL, *SHORT], ids=str)


def close(x: Tensor, y: Tensor, tolerance: float = EXACT) -> bool:
    return float((x - y).norm()) <= tolerance * float(y.norm())


def gram(x: Tensor) -> Tensor:
    return x.mH @ x


def diagonal(s: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.diag_embed(s).to(dtype)


def size(g: Tensor, h: Tensor) -> Tensor:
    """‖G‖² + ‖H‖² of each copy."""
    return (g.abs() ** 2).sum((1, 2)) + (h.abs() ** 2).sum((1, 2))


@each_case
def test_the_product_stays(case: Case) -> None:
    g, h = case.pair()
    base = canonical(g, h)
    assert close(base.g @ base.h.mH, g @ h.mH)


@each_case
def test_both_gram_matrices_are_the_same_diagonal(case: Case) -> None:
    base = canonical(*case.pair())
    for factor in (base.g, base.h):
        assert close(gram(factor), diagonal(base.s, case.dtype))


@each_case
def test_the_frames_are_orthonormal_where_the_pair_has_a_direction_and_zero_elsewhere(case: Case) -> None:
    base = canonical(*case.pair())
    for frame in (base.frame_g, base.frame_h):
        assert close(gram(frame), diagonal(base.kept.double(), case.dtype))


@each_case
def test_s_are_the_singular_values_of_the_product_in_descending_order(case: Case) -> None:
    g, h = case.pair()
    expected = torch.linalg.svdvals(g @ h.mH)
    n = min(case.d, expected.shape[1])
    s = canonical(g, h).s
    assert close(s[:, :n], expected[:, :n])
    assert float(s[:, n:].abs().sum()) == 0
    assert bool((s.diff(dim=-1) <= 0).all())


@each_tall
def test_all_points_of_an_orbit_have_one_representative(case: Case) -> None:
    g, h = case.pair()
    here, there = canonical(g, h), canonical(*act(g, h, case.element()))
    for name in ("g", "h", "s", "frame_g", "frame_h"):
        assert close(getattr(there, name), getattr(here, name)), name


@each_tall
def test_the_representative_of_the_representative_is_itself(case: Case) -> None:
    base = canonical(*case.pair())
    again = canonical(base.g, base.h)
    assert close(again.g, base.g)
    assert close(again.h, base.h)
    assert close(again.transform, torch.eye(case.d, dtype=case.dtype).expand(COPIES, -1, -1))


@each_case
def test_the_largest_entry_of_every_column_of_g_is_real_and_positive(case: Case) -> None:
    g = canonical(*case.pair()).g
    lead = g.gather(1, g.abs().argmax(1, keepdim=True)).squeeze(1)
    assert torch.allclose(lead, lead.abs().to(case.dtype), rtol=0, atol=1e-14)


@each_tall
def test_no_point_of_the_orbit_is_smaller_and_the_size_is_twice_the_sum_of_s(case: Case) -> None:
    base = canonical(*case.pair())
    least = size(base.g, base.h)
    assert close(least, 2 * base.s.sum(-1))
    for seed in range(20):
        for condition in (1.01, 3.0, 100.0):
            a = case.element(seed, condition)
            assert bool((size(*act(base.g, base.h, a)) >= least * (1 - EXACT)).all())
    assert bool((size(*case.pair()) >= least).all())


@each_tall
def test_transform_carries_the_representative_to_the_pair_and_inverse_carries_it_back(case: Case) -> None:
    g, h = case.pair()
    base = canonical(g, h)
    one = torch.eye(case.d, dtype=case.dtype).expand(COPIES, -1, -1)
    assert close(base.g @ base.transform, g)
    assert close(base.h @ base.inverse.mH, h)
    assert close(base.transform @ base.inverse, one)
    moved = act(g, h, base.transform)
    assert close(moved[0], base.g)
    assert close(moved[1], base.h)
    back = act(base.g, base.h, base.inverse)
    assert close(back[0], g)
    assert close(back[1], h)


@each_tall
def test_copies_do_not_feel_each_other(case: Case) -> None:
    g, h = case.pair()
    base = canonical(g, h)
    for i in range(COPIES):
        alone = canonical(g[i : i + 1], h[i : i + 1])
        assert close(alone.g[0], base.g[i])
        assert close(alone.s[0], base.s[i])


def test_one_column_is_divided_so_that_both_norms_are_the_root_of_s() -> None:
    g, h = Case(9, 7, 1, True).pair()
    base = canonical(g, h)
    norm_g, norm_h = g.norm(dim=1), h.norm(dim=1)
    assert close(base.s, norm_g * norm_h)
    assert close(base.g.norm(dim=1), (norm_g * norm_h).sqrt())
    assert close(base.h.norm(dim=1), (norm_g * norm_h).sqrt())


def test_one_column_agrees_with_the_general_way_on_a_pair_of_rank_one() -> None:
    for complex_ in (False, True):
        g, h = Case(9, 7, 1, complex_).pair()
        zeros_g, zeros_h = torch.zeros_like(g), torch.zeros_like(h)
        wide = canonical(torch.cat([g, zeros_g], -1), torch.cat([h, zeros_h], -1))
        narrow = canonical(g, h)
        assert wide.rank.tolist() == [1] * COPIES
        assert close(wide.g[..., :1], narrow.g)
        assert close(wide.h[..., :1], narrow.h)


# ------------------------------------------------------------------------------------------------- missing directions


def deficient(case: Case, rank: int) -> tuple[Tensor, Tensor]:
    """A pair whose factors have full rank minus some columns' worth in G."""
    g, h = case.pair()
    g = g.clone()
    g[..., rank:] = g[..., :rank] @ case.pair(5)[1][:, :rank, rank:]
    return g, h


@pytest.mark.parametrize("case", [Case(9, 7, 5), Case(9, 7, 5, True)], ids=str)
@pytest.mark.parametrize("rank", [1, 3, 4])
def test_a_deficient_pair_keeps_its_product_and_tells_its_rank(case: Case, rank: int) -> None:
    g, h = deficient(case, rank)
    base = canonical(g, h)
    assert base.rank.tolist() == [rank] * COPIES
    assert base.kept.sum(-1).tolist() == [rank] * COPIES
    assert close(base.g @ base.h.mH, g @ h.mH)
    assert close(gram(base.frame_g), diagonal(base.kept.double(), case.dtype))
    assert float(base.g[..., rank:].abs().sum() + base.h[..., rank:].abs().sum()) == 0


@pytest.mark.parametrize("case", [Case(9, 7, 5), Case(9, 7, 5, True)], ids=str)
def test_a_deficient_pair_moved_along_its_orbit_has_the_same_representative(case: Case) -> None:
    g, h = deficient(case, 3)
    here, there = canonical(g, h), canonical(*act(g, h, case.element()))
    assert close(there.g, here.g)
    assert close(there.h, here.h)


@pytest.mark.parametrize("case", [Case(9, 7, 5), Case(9, 7, 5, True), *SHORT], ids=str)
def test_transform_times_inverse_is_one_on_the_directions_that_are_kept(case: Case) -> None:
    base = canonical(*(case.pair() if case in SHORT else deficient(case, 3)))
    assert base.transform.shape == base.inverse.shape == (COPIES, case.d, case.d)
    assert close(base.transform @ base.inverse, diagonal(base.kept.double(), case.dtype))


@pytest.mark.parametrize("case", [Case(9, 7, 1), Case(9, 7, 4), Case(9, 7, 1, True), Case(9, 7, 4, True)], ids=str)
@pytest.mark.parametrize("which", ["g", "h", "both"])
def test_a_zero_factor_has_rank_zero_and_nothing_but_zeros(case: Case, which: str) -> None:
    g, h = case.pair()
    zero_g, zero_h = which in ("g", "both"), which in ("h", "both")
    base = canonical(torch.zeros_like(g) if zero_g else g, torch.zeros_like(h) if zero_h else h)
    assert base.rank.tolist() == [0] * COPIES
    for value in (base.s, base.frame_g, base.frame_h, base.g, base.h):
        assert float(value.abs().sum()) == 0
    assert bool(torch.isfinite(base.transform).all() and torch.isfinite(base.inverse).all())


def test_one_dead_copy_leaves_the_others_alone() -> None:
    case = Case(9, 7, 4)
    g, h = case.pair()
    whole = canonical(g, h)
    dead = g.clone()
    dead[2] = 0
    base = canonical(dead, h)
    assert base.rank.tolist() == [4, 4, 0, 4]
    assert all(close(base.g[i], whole.g[i]) for i in (0, 1, 3))


def test_the_cut_off_is_relative_to_the_largest_singular_value() -> None:
    g = torch.diag_embed(torch.tensor([[1.0, 1e-3, 1e-9]], dtype=torch.float64)) * 1e5
    h = torch.eye(3, dtype=torch.float64).unsqueeze(0) * 1e-7
    assert canonical(g, h).rank.tolist() == [3]
    assert canonical(g, h, cutoff=1e-6).rank.tolist() == [2]
    assert canonical(g, h, cutoff=1e-2).rank.tolist() == [1]
    assert canonical(g.float(), h.float()).rank.tolist() == [2]


# ------------------------------------------------------------------------------------------------------------- dtypes


@pytest.mark.parametrize("complex_", [False, True])
def test_single_precision_is_computed_in_double(complex_: bool) -> None:
    g, h = (x.to(torch.complex64 if complex_ else torch.float32) for x in Case(9, 7, 5, complex_).pair())
    wide = torch.complex128 if complex_ else torch.float64
    base, reference = canonical(g, h), canonical(g.to(wide), h.to(wide))
    assert (base.s.dtype, base.g.dtype) == (torch.float64, wide)
    assert torch.equal(base.s, reference.s)
    assert torch.equal(base.g, reference.g)


def test_half_precision_is_computed_in_double_too() -> None:
    g, h = (x.bfloat16() for x in Case(9, 7, 5).pair())
    base = canonical(g, h)
    assert close(base.g @ base.h.mH, g.double() @ h.double().mH)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("d", [1, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_entries_that_are_not_finite_are_refused(value: float, d: int, side: int) -> None:
    pair = Case(9, 7, d).pair()
    pair[side][1, 2, 0] = value
    with pytest.raises(ValueError, match="NaN or infinite"):
        canonical(*pair)


@pytest.mark.parametrize("shapes", [((9, 3), (7, 3)), ((2, 9, 3), (3, 7, 3)), ((2, 9, 3), (2, 7, 4))], ids=str)
def test_shapes_that_are_no_pair_are_refused_with_both_shapes(shapes: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match=r"\(copies, N, d\)"):
        canonical(*(torch.zeros(s) for s in shapes))


def test_acting_twice_is_acting_with_the_product() -> None:
    for case in TALL:
        g, h = case.pair()
        a, b = case.element(1), case.element(2)
        once, twice = act(g, h, b @ a), act(*act(g, h, a), b)
        assert close(twice[0], once[0], 1e-10)
        assert close(twice[1], once[1], 1e-10)
        assert close(twice[0] @ twice[1].mH, g @ h.mH, 1e-10)
