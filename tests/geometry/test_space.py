"""The product space: tangent vectors in pieces, one norm, and a Gaussian that is horizontal and of the right size."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_geosharp.geometry.gauge import canonical
from hf_geosharp.geometry.metrics import ENTRY_METRICS, PAIR_METRICS
from hf_geosharp.geometry.space import Part, Recipe, Space, Sum
from tests.oracles import pair_formulas as oracle

N, M, COPIES = 7, 5, 3


def random(*shape: int, seed: int = 0, complex_: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.complex128 if complex_ else torch.float64)


def pair_part(metric: str, d: int, *, complex_: bool = False, rank: int | None = None, seed: int = 0) -> Part:
    g, h = random(COPIES, N, d, seed=seed, complex_=complex_), random(COPIES, M, d, seed=seed + 1, complex_=complex_)
    if rank is not None:
        g[..., rank:] = 0
    frame = PAIR_METRICS[metric].frame(canonical(g, h), g.dtype)
    name = f"{metric}-{d}-{complex_}-{rank}"
    return Part(name, frame, ((COPIES, d, N), (COPIES, d, M)), complex_, "second")


def loose_part(zeros: int = 2) -> Part:
    theta = random(1, 11, seed=9)
    theta[0, :zeros] = 0
    return Part("loose", ENTRY_METRICS["adaptive"].at(theta), ((1, 11),), False, "first")


def space(metric: str) -> Space:
    parts = [
        pair_part(metric, 3),
        pair_part(metric, 1, complex_=True, seed=2),
        pair_part(metric, 3, rank=2, seed=4),
        pair_part(metric, 2, complex_=True, seed=6),
        loose_part(),
    ]
    return Space(parts, torch.float64, torch.device("cpu"))


each_metric = pytest.mark.parametrize("metric", list(PAIR_METRICS))

DIMENSIONS = [
    COPIES * ((N + M) * 3 - 9),
    COPIES * 2 * ((N + M) - 1),
    COPIES * ((N + M) * 2 - 4),
    COPIES * 2 * ((N + M) * 2 - 4),
    9,
]
"""Rows times rank less what is vertical, twice for complex pairs; entries that are not zero."""


@each_metric
def test_the_size_counts_coordinates_and_the_dimension_counts_horizontal_directions(metric: str) -> None:
    s = space(metric)
    sizes = [COPIES * (N + M) * 3, COPIES * (N + M) * 2, COPIES * (N + M) * 3, COPIES * (N + M) * 4, 11]
    assert [p.numel for p in s.parts] == sizes
    assert s.size == sum(sizes)
    assert [p.frame.dimension for p in s.parts] == DIMENSIONS
    assert s.dimension == sum(DIMENSIONS)
    assert s.zeros().flat().shape == (s.size,)


@each_metric
def test_the_dimension_is_the_rank_of_the_horizontal_projection(metric: str) -> None:
    s = space(metric)
    columns = torch.stack([s.horizontal_(s.unflatten(row)).flat() for row in torch.eye(s.size, dtype=torch.float64)])
    values = torch.linalg.svdvals(columns)
    assert int((values > 0.5).sum()) == s.dimension
    # An orthogonal projection: singular values are ones and zeros, and it is symmetric.
    assert torch.allclose(values[: s.dimension], torch.ones(s.dimension, dtype=torch.float64), atol=1e-10)
    assert float(values[s.dimension :].abs().max()) < 1e-10
    assert torch.allclose(columns, columns.T, atol=1e-10)


@each_metric
def test_projecting_twice_is_projecting_once(metric: str) -> None:
    s = space(metric)
    once = s.horizontal_(s.unflatten(random(s.size)))
    assert torch.allclose(s.horizontal_(once.clone()).flat(), once.flat(), rtol=0, atol=1e-12)


@each_metric
def test_a_random_vector_is_horizontal_by_the_formulas_in_the_gauge_of_the_pair(metric: str) -> None:
    part = pair_part(metric, 3)
    s = Space([part], torch.float64, torch.device("cpu"))
    u = s.random(torch.Generator().manual_seed(0))
    xi = part.frame.vector(part.split(u.pieces[0]))
    frame = part.frame
    g, h = (q * frame.s.sqrt().unsqueeze(-2) for q in frame.q)  # type: ignore[attr-defined]
    for i in range(COPIES):
        assert float(oracle.horizontality(metric, (g[i], h[i]), (xi[0][i], xi[1][i]))) < 1e-11


@each_metric
def test_a_random_vector_has_no_component_where_the_point_has_no_direction(metric: str) -> None:
    s = space(metric)
    u = s.random(torch.Generator().manual_seed(0))
    pieces = dict(zip([p.name for p in s.parts], s.slices(u), strict=True))
    assert float(pieces["loose"][1][:2].abs().sum()) == 0
    deficient, piece = pieces[f"{metric}-3-False-2"]
    assert all(float(x[..., 2:].abs().sum()) == 0 for x in deficient.split(piece))


@each_metric
def test_the_mean_squared_norm_of_a_random_vector_is_the_dimension_part_by_part(metric: str) -> None:
    s, draws = space(metric), 400
    generator = torch.Generator().manual_seed(0)
    squares = torch.zeros(len(s.parts), dtype=torch.float64)
    for _ in range(draws):
        u = s.random(generator)
        squares += torch.stack([piece.square().sum() for _, piece in s.slices(u)])
    for mean, dimension in zip((squares / draws).tolist(), DIMENSIONS, strict=True):
        # Chi-squared: standard deviation of one draw √(2 n); four of them for the mean of all draws.
        assert abs(mean - dimension) < 4 * math.sqrt(2 * dimension / draws)


@each_metric
def test_a_random_vector_is_the_same_for_the_same_seed(metric: str) -> None:
    s = space(metric)
    first, again, other = (s.random(torch.Generator().manual_seed(i)) for i in (3, 3, 4))
    assert torch.equal(first.flat(), again.flat())
    assert not torch.equal(first.flat(), other.flat())


def test_dot_and_norm_are_those_of_the_flat_vectors() -> None:
    s = space("inv")
    u, v = random(s.size), random(s.size, seed=1)
    assert s.dot(s.unflatten(u), s.unflatten(v)) == pytest.approx(float((u * v).sum()), rel=1e-14)
    assert s.norm(s.unflatten(u)) == pytest.approx(float(u.norm()), rel=1e-14)


def test_a_sweep_works_out_its_sums_in_order_and_then_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    # Chunks shorter than the parts, so that each part takes several.
    monkeypatch.setattr("hf_geosharp.geometry.space._CHUNK", 4)
    there = space("mix")
    u, v, w = (there.random(torch.Generator().manual_seed(seed)) for seed in (0, 1, 2))
    a, b = u.flat(), v.flat()
    products = there.sweep(
        (Sum(w, Recipe(((u, 0.5), (v, -2.0)), 3.0)), Sum.of(u, (u, 1.0), (w, -1.0)), Sum.of(v, (v, 0.25), (u, 1.0))),
        ((w, w), (u, v)),
    )
    c = 3.0 * (0.5 * a - 2.0 * b)
    a = a - c
    b = 0.25 * b + a
    for found, wanted in zip((w, u, v), (c, a, b), strict=True):
        torch.testing.assert_close(found.flat(), wanted, rtol=1e-14, atol=1e-14)
    assert products == pytest.approx([float(c @ c), float(a @ b)], rel=1e-13)


def test_a_recipe_is_the_vector_that_it_makes_to_the_last_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole, part by part, in products, and in the memory of its first vector."""
    monkeypatch.setattr("hf_geosharp.geometry.space._CHUNK", 7)
    there = space("mix")
    u, v, w = (there.random(torch.Generator().manual_seed(seed)) for seed in (0, 1, 2))
    recipe = Recipe(((u, 0.3), (v, -2.1), (w, 1e-3)), 0.7)
    made = there.empty()
    there.sweep((Sum(made, recipe),))
    pieces = [recipe.piece(i) for i in range(len(there.parts))]
    assert all(torch.equal(a, b) for a, b in zip(pieces, made.pieces, strict=True))
    products = there.dots((recipe, recipe), (recipe, u))
    assert products == pytest.approx(there.dots((made, made), (made, u)), rel=1e-14)
    there.sweep((Sum(u, recipe),))
    assert all(torch.equal(a, b) for a, b in zip(u.pieces, made.pieces, strict=True))


def test_the_norm_of_a_long_single_precision_vector_does_not_drift_with_its_length() -> None:
    n = (1 << 21) + 17
    part = Part("long", ENTRY_METRICS["euclidean"].at(torch.zeros(1, n)), ((1, n),), False, "first")
    s = Space([part], torch.float32, torch.device("cpu"))
    u = random(n).float()
    # Chunks are summed in single precision: a few 1e-6 within each, nothing more across them.
    assert s.norm(s.unflatten(u)) == pytest.approx(float(u.double().norm()), rel=1e-5)


@each_metric
def test_the_norm_is_that_of_the_metric_in_the_gauge_of_the_pair(metric: str) -> None:
    for complex_ in (False, True):
        part = pair_part(metric, 2, complex_=complex_)
        s = Space([part], torch.float64, torch.device("cpu"))
        u = random(s.size, seed=5)
        xi = part.frame.vector(part.split(u))
        g, h = (q * part.frame.s.sqrt().unsqueeze(-2) for q in part.frame.q)  # type: ignore[attr-defined]
        squares = [
            oracle.inner(metric, (g[i], h[i]), (xi[0][i], xi[1][i]), (xi[0][i], xi[1][i])) for i in range(COPIES)
        ]
        assert s.norm(s.unflatten(u)) ** 2 == pytest.approx(float(sum(squares)), rel=1e-12)


@pytest.mark.parametrize("complex_", [False, True])
def test_a_part_splits_its_slice_into_factors_with_contiguous_rows_in_memory(complex_: bool) -> None:
    part = pair_part("inv", 2, complex_=complex_)
    flat = torch.arange(part.numel, dtype=torch.float64)
    g, h = part.split(flat)
    assert (tuple(g.shape), tuple(h.shape)) == ((COPIES, N, 2), (COPIES, M, 2))
    first = flat[: flat.numel() * N // (N + M)]
    expected = torch.view_as_complex(first.view(COPIES, 2, N, 2)) if complex_ else first.view(COPIES, 2, N)
    assert torch.equal(g, expected.mT)
    assert torch.equal(part.storage(flat)[0], expected)
    assert all(x.is_contiguous() for x in part.storage(flat))


@pytest.mark.parametrize("complex_", [False, True])
def test_writing_into_the_factors_of_a_slice_writes_into_the_vector(complex_: bool) -> None:
    part = pair_part("inv", 2, complex_=complex_)
    flat = torch.zeros(part.numel, dtype=torch.float64)
    for x in part.split(flat):
        x.fill_(1 + 1j if complex_ else 1)
    assert torch.equal(flat, torch.ones_like(flat))
