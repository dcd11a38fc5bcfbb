"""Gauge health against what is known otherwise: numpy on single heads, the canonical gauge, faults built in."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.geometry.gauge import canonical
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.health import HeadHealth, health
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.parameters import put, wide_copy
from hf_geosharp.symmetry.views import View
from tests.families import BY_NAME, Family, batch_of, build, each_family, identical, state

FAST = ("bert", "vit", "gpt2", "llama")


def found(name: str) -> tuple[nn.Module, SymmetryMap]:
    model = build(name)
    return model, find_symmetries(model, batch_of(name))


def of(heads: Iterable[HeadHealth], module: str, kind: str) -> list[HeadHealth]:
    return [h for h in heads if h.kind == kind and h.module.endswith(module)]


def numbers(head: HeadHealth) -> np.ndarray:
    return np.array(head.singular_values)


@each_family
def test_a_random_element_moves_condition_and_balance_but_not_the_product(family: Family) -> None:
    model, symmetries = found(family.name)
    before = state(model)
    plain = health(model, symmetries)
    assert identical(model, before)
    assert len(plain) == 2 * family.attentions * family.heads
    symmetries.apply(model, symmetries.random_element(model, 1, 100.0))
    moved = health(model, symmetries)
    for a, b in zip(plain, moved, strict=True):
        assert (a.site, a.head, a.rank, a.dim, a.flags) == (b.site, b.head, b.rank, b.dim, b.flags)
        assert a.rank == a.dim == family.head_dim
        # Measured: 1.5e-14.
        np.testing.assert_allclose(numbers(b), numbers(a), rtol=1e-11)
        assert a.balance is not None
        assert a.balance >= 1
    for name in ("balance", "condition"):
        assert np.median([getattr(b, name) / getattr(a, name) for a, b in zip(plain, moved, strict=True)]) > 2


@pytest.mark.parametrize("name", FAST)
def test_in_the_canonical_gauge_the_balance_is_one(name: str) -> None:
    model, symmetries = found(name)
    weights = wide_copy(model, symmetries.parameters)
    for fold in symmetries.folds:
        fold.canonicalise(weights)
    for pair in symmetries.pairs:
        own = symmetries.coordinates(pair)
        gauge = canonical(*own.factors(weights))
        own.set_factors(weights, gauge.g, gauge.h)
    plain = health(model, symmetries)
    put(model, weights)
    for before, head in zip(plain, health(model, symmetries), strict=True):
        assert head.balance == pytest.approx(1, abs=1e-12)
        np.testing.assert_allclose(numbers(head), numbers(before), rtol=1e-11)


def test_the_numbers_of_a_head_are_those_of_numpy() -> None:
    """BERT's first layer: no gain folds into it, a norm's bias does, the key bias is none of the product.

    What lies along the means that the norms before and after it take out is none of the products either.
    """
    model, symmetries = found("bert")
    own = model.get_parameter
    attention = "bert.encoder.layer.0.attention"
    q, k, v = (own(f"{attention}.self.{name}.weight").detach().numpy() for name in ("query", "key", "value"))
    bias = own(f"{attention}.self.query.bias").detach().numpy()
    out = own(f"{attention}.output.dense.weight").detach().numpy()
    along = 1 / own("bert.embeddings.LayerNorm.weight").detach().numpy()
    bias = bias + q @ own("bert.embeddings.LayerNorm.bias").detach().numpy()
    q, k, v = (x - np.outer(x @ along, along) / (along @ along) for x in (q, k, v))
    out = out - out.mean(0)
    heads = health(model, symmetries)
    for kind in ("qk", "vo"):
        for head in of(heads, attention, kind):
            rows = slice(8 * head.head, 8 * head.head + 8)
            g = np.vstack([q[rows].T, bias[rows]]) if kind == "qk" else v[rows].T
            h = k[rows].T if kind == "qk" else out[:, rows]
            s = np.linalg.svd(g @ h.T, compute_uv=False)[:8]
            np.testing.assert_allclose(numbers(head), s, rtol=1e-11)
            assert head.condition_g == pytest.approx(np.linalg.cond(g), rel=1e-10)
            assert head.condition_h == pytest.approx(np.linalg.cond(h), rel=1e-10)
            assert head.balance == pytest.approx(((g**2).sum() + (h**2).sum()) / (2 * s.sum()), rel=1e-11)
            assert head.norm == pytest.approx(np.linalg.norm(g @ h.T), rel=1e-11)


def test_a_rotary_head_has_all_its_frequencies() -> None:
    """Llama: a column of a head pairs with the one half a head further; a key head carries two query heads."""
    model, symmetries = found("llama")
    layer = model.get_submodule("model.layers.0")
    gain = layer.input_layernorm.weight.detach().numpy()
    q, k = (getattr(layer.self_attn, f"{r}_proj").weight.detach().numpy() * gain for r in "qk")
    heads = of(health(model, symmetries), "layers.0.self_attn", "qk")
    assert [h.head for h in heads] == [0, 1]
    for head in heads:
        h = k[8 * head.head :][:8]
        g = q[16 * head.head :][:16].reshape(2, 8, -1)
        sizes = [np.sqrt((g[:, [f, f + 4]] ** 2).sum()) * np.sqrt((h[[f, f + 4]] ** 2).sum()) for f in range(4)]
        np.testing.assert_allclose(numbers(head), sorted(sizes, reverse=True), rtol=1e-11)
        assert head.dim == 8
        assert head.condition_h == pytest.approx(np.linalg.cond(h.T), rel=1e-10)
        assert head.condition_g == pytest.approx(np.linalg.cond(g.transpose(0, 2, 1).reshape(-1, 8)), rel=1e-10)


def edit(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).data


@pytest.mark.parametrize("size", [0.0, 1e-7])
def test_a_dead_head_is_flagged(size: float) -> None:
    model, symmetries = found("bert")
    attention = "bert.encoder.layer.1.attention"
    edit(model, f"{attention}.output.dense.weight")[:, 8:16] *= size
    heads = health(model, symmetries)
    (dead,) = [h for h in heads if h.flags]
    assert (dead.module, dead.kind, dead.head, dead.flags) == (attention, "vo", 1, ("dead",))
    assert dead.rank == (8 if size else 0)
    assert (dead.balance is None) == (size == 0)
    assert (dead.condition_h is None) == (size == 0)
    assert dead.condition_g is not None


def test_a_head_of_lower_rank_is_flagged_also_after_it_was_moved() -> None:
    model, symmetries = found("bert")
    keys = edit(model, "bert.encoder.layer.0.attention.self.key.weight")
    keys[23] = keys[22] + keys[21]
    for _ in range(2):
        heads = health(model, symmetries)
        (low,) = [h for h in heads if h.flags]
        assert (low.module, low.kind, low.head, low.flags) == (
            "bert.encoder.layer.0.attention", "qk", 2, ("rank-deficient",)
        )  # fmt: skip
        assert (low.rank, low.dim, low.condition_h) == (7, 8, None)
        assert low.condition_g is not None
        assert low.singular_values[-1] < 1e-12 * low.singular_values[0]
        symmetries.apply(model, symmetries.random_element(model, 3, 100.0))


def test_a_rotary_head_without_a_frequency_has_lost_two_columns() -> None:
    model, symmetries = found("llama")
    keys = edit(model, "model.layers.1.self_attn.k_proj.weight")
    keys[[8 + 3, 8 + 3 + 4]] = 0
    (low,) = [h for h in health(model, symmetries) if h.flags]
    assert (low.kind, low.head, low.rank, low.dim, low.flags) == ("qk", 1, 6, 8, ("rank-deficient",))


def test_ranks_are_counted_as_in_a_score_whatever_the_dtype_of_the_weights() -> None:
    """In float64 down to 1e-12, where a score leaves out what is below 1e-6."""
    model, symmetries = found("bert")
    values = edit(model, "bert.encoder.layer.0.attention.self.value.weight")
    values[0] = values[1]
    values[0, 0] += 1e-8
    assert not any(h.flags for h in health(model, symmetries, cutoff=1e-12))
    (low,) = [head for head in health(model, symmetries) if head.flags]
    (reduced,) = score(model, [batch_of("bert")], steps=1, reproducibility=False).pairs.reduced
    assert (low.flags, low.rank) == (("rank-deficient",), 7)
    assert reduced.startswith(low.site)
    assert f"{low.head} (rank {low.rank})" in reduced
    assert [h.flags for h in health(model.float(), symmetries) if h.flags] == [("rank-deficient",)]


class _Partial(nn.Module):
    """Two heads of 6 columns: four rotary (half pairs), with a key bias; two not, where it has folded away."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Parameter(torch.randn(12, 5, dtype=torch.float64)) for _ in range(2))
        self.b = nn.Parameter(torch.randn(12, dtype=torch.float64))


def _partial_map() -> SymmetryMap:
    sizes = {"n": 2, "i": 5}

    def rest(name: str, rows: tuple[str, ...] = ("i",)) -> View:
        view = View.pattern(name, (("n", "w"), *((r,) for r in rows)), {**sizes, "w": 6}, ("n",), ("w",), rows)
        axes = tuple(type(a)(a.name, 2, a.dimension, a.step) if a.name == "w" else a for a in view.axes)
        return type(view)(name, axes, (4, *view.start[1:]), ("n",), ("w",), rows)

    def rotary(name: str, rows: tuple[str, ...] = ("i",)) -> View:
        view = View.pattern(name, (("n", "w"), *((r,) for r in rows)), {**sizes, "w": 6}, ("n",), ("w",), rows)
        n, step = next(a for a in view.axes if a.name == "n"), 1
        axes = (n, type(n)("c", 2, 0, 2 * step), type(n)("f", 2, 0, step), *(a for a in view.axes if a.name == "i"))
        return type(view)(name, axes, view.start, ("n", "f"), (), rows, field="c")

    return SymmetryMap(
        (
            Pair("qk.rotary", "qk", "", Group(1, complex=True), (rotary("q"),), (rotary("k"), rotary("b", ()))),
            Pair("qk.rest", "qk", "", Group(2), (rest("q"),), (rest("k"),)),
        )
    )


def test_the_rotary_and_the_other_columns_of_a_head_are_one_head() -> None:
    torch.manual_seed(0)
    model, symmetries = _Partial(), _partial_map()
    q, k, b = (p.detach().numpy() for p in (model.q, model.k, model.b))
    heads = health(model, symmetries)
    assert [(h.head, h.dim, h.rank) for h in heads] == [(0, 6, 6), (1, 6, 6)]
    for head in heads:
        g, low, bias = (x[6 * head.head :][:6] for x in (q, k, b))
        h = np.column_stack([low, bias * [1, 1, 1, 1, 0, 0]])
        rotary = [np.linalg.norm(g[[f, f + 2]]) * np.linalg.norm(h[[f, f + 2]]) for f in range(2)]
        rest = np.linalg.svd(g[4:].T @ h[4:], compute_uv=False)[:2]
        np.testing.assert_allclose(numbers(head), sorted([*rotary, *rest], reverse=True), rtol=1e-12)
        assert head.condition_h == pytest.approx(np.linalg.cond(h.T), rel=1e-10)


def test_a_head_wider_than_its_input_has_no_full_rank() -> None:
    """A product of two factors with fewer rows than columns: ranks count, conditions do not exist."""
    model = nn.Module()
    model.v, model.o = (nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
    views = [View.pattern(name, "i (n h)", {"i": 3, "n": 1, "h": 4}, ("n",), ("h",), ("i",)) for name in "vo"]
    symmetries = SymmetryMap((Pair("vo", "vo", "", Group(4), (views[0],), (views[1],)),))
    (head,) = health(model, symmetries)
    assert (head.rank, head.dim, head.condition_g, head.condition_h) == (3, 4, None, None)
    assert head.flags == ("rank-deficient",)


@pytest.mark.parametrize("group", [Group(4, isometric=True), Group(4)])
def test_where_lengths_cannot_change_the_balance_is_one(group: Group) -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.v, model.o = (nn.Parameter(torch.randn(5, 8, dtype=torch.float64)) for _ in range(2))
    views = [View.pattern(name, "i (n h)", {"i": 5, "n": 2, "h": 4}, ("n",), ("h",), ("i",)) for name in "vo"]
    symmetries = SymmetryMap((Pair("vo", "vo", "", group, (views[0],), (views[1],)),))
    plain = health(model, symmetries)
    symmetries.apply(model, symmetries.random_element(model, 1, 100.0))
    for before, after in zip(plain, health(model, symmetries), strict=True):
        np.testing.assert_allclose(numbers(after), numbers(before), rtol=1e-11)
        if group.isometric:
            assert before.balance == after.balance == pytest.approx(1, abs=1e-14)
            assert after.condition == pytest.approx(before.condition, rel=1e-11)
        else:
            assert after.balance != pytest.approx(1, rel=0.1)


def test_a_map_without_pairs_has_no_heads() -> None:
    assert health(build("bert"), SymmetryMap()) == ()


def test_families_of_the_fast_tests_exist() -> None:
    assert set(FAST) <= set(BY_NAME)
