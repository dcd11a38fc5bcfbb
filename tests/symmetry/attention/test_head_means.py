"""Means that a norm takes out of queries and keys: which heads, how many numbers, and that no score feels them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp import score
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Mean
from hf_geosharp.symmetry.verify import verify
from tests.symmetry.handmade import (
    HEAD,
    TOKENS,
    WIDTH,
    Fused,
    Normed,
    Projected,
    Residual,
    attend,
    finder,
    half,
    inputs,
    interleaved,
)


def _layer_norm(x: Tensor) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:])


class FusedNormed(Fused):
    """Fused weights, whose queries and keys are normalised without weights; values are not."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(half(_layer_norm(q)), half(_layer_norm(k)), v)


@dataclass(frozen=True)
class Case:
    """A module, and how many heads its queries and its keys have that a mean is taken out of."""

    module: Callable[[], nn.Module]
    heads: tuple[int, ...]
    coordinates: int = HEAD


CASES = {
    "head by head": Case(lambda: Normed("head", centred=True), (4, 4)),
    "head by head, biases": Case(lambda: Normed("head", half, centred=True, bias=True), (4, 4)),
    "head by head, rotary in neighbours": Case(lambda: Normed("heads", interleaved, centred=True), (4, 4)),
    "head by head, grouped queries": Case(lambda: Normed("head", half, centred=True, key_heads=2), (4, 2)),
    "without weights": Case(lambda: Normed("none", centred=True), (4, 4)),
    "without weights, rotary": Case(lambda: Normed("none", half, centred=True), (4, 4)),
    "all heads at once": Case(lambda: Normed("width", half, centred=True), (1, 1), 4 * HEAD),
    "all heads at once, grouped queries": Case(lambda: Normed("width", centred=True, key_heads=1), (1, 1), 4 * HEAD),
    # After the embedding has turned it, what was the same for all coordinates is not.
    "rotary before the norm": Case(lambda: Normed("head", half, first="rotary", centred=True), ()),
    "a norm that takes out no mean": Case(lambda: Normed("head", half), ()),
    "no norm": Case(Projected, ()),
}
each_case = pytest.mark.parametrize("name", CASES)
find = finder(CASES)


def centred(found: SymmetryMap) -> list[Mean]:
    return [f for f in found.folds if isinstance(f, Mean)]


@each_case
def test_each_head_has_a_number_for_every_input_and_its_bias(name: str) -> None:
    folds = centred(find(name)[1])
    assert [f.views[0].count for f in folds] == list(CASES[name].heads)
    assert [f.dimension for f in folds] == [heads * (WIDTH + 1) for heads in CASES[name].heads]
    assert all(not f.fixed for f in folds)


@each_case
def test_every_mean_holds_and_shows_when_one_coordinate_has_it_alone(name: str) -> None:
    model, found = find(name)
    proof = verify(model, found, [inputs(1), inputs(2)], each=True)
    assert proof.map == found
    assert all((c.deviation or 0.0) < 1e-11 and (c.control or 0.0) > 1e-4 for c in proof.claims)


@each_case
def test_the_representative_has_no_means_and_is_the_same_for_all_that_are_one_function(name: str) -> None:
    model, found = find(name)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    moved = {n: w.clone() for n, w in weights.items()}
    generator = torch.Generator().manual_seed(0)
    for fold in centred(found):
        fold.apply(moved, fold.random(moved, generator, 10.0))
        for w in (weights, moved):
            fold.canonicalise(w)
        for view in fold.views:
            means = view.of(weights[view.parameter]).mean(1)
            assert means.abs().max() < 1e-15
    assert all(torch.allclose(moved[n], weights[n], rtol=0, atol=1e-12) for n in weights)


def test_a_shift_is_undone_by_the_opposite_one() -> None:
    model, found = find("head by head, biases")
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    (fold, _) = centred(found)
    move = fold.random(weights, torch.Generator().manual_seed(0), 10.0)
    fold.apply(weights, move)
    assert not torch.allclose(weights["parts.0.q.weight"], model.get_parameter("parts.0.q.weight"))
    fold.apply(weights, fold.inverse(move))
    assert all(torch.allclose(weights[n], p, rtol=0, atol=1e-14) for n, p in model.named_parameters())


@pytest.mark.parametrize("layout", ["s n h", "n s h", "s h n"])
def test_of_fused_weights_queries_and_keys_alone(layout: str) -> None:
    """Values have no derivative in the logits: they are in no head."""
    model = Residual(FusedNormed(layout))
    found = find_symmetries(model, inputs())
    (fold,) = centred(found)
    assert fold.views[0].count == 8
    assert verify(model, found, [inputs(1)], each=True).map == found


def test_without_weights_or_rotation_what_is_left_are_rotations_that_keep_the_mean() -> None:
    """For each head (d - 1) (d - 2) / 2 of them; a norm that takes out no mean leaves d (d - 1) / 2."""
    found = find("without weights")[1]
    (pair,) = (p for p in found.pairs if p.kind == "qk")
    assert (pair.group.name, pair.copies, pair.dimension) == (f"O({HEAD}) fixing 1", 4, 4 * 10)
    plain = find_symmetries(Residual(Normed("none")), inputs())
    (pair,) = (p for p in plain.pairs if p.kind == "qk")
    assert (pair.group.name, pair.dimension) == (f"O({HEAD})", 4 * 15)


def test_the_dimensions_are_all_there_are() -> None:
    """As many as the Jacobian of the logits in the projections has a null space, for a norm without weights."""
    generator = torch.Generator().manual_seed(0)
    d, width, tokens = 4, 3, 12
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    q, k = torch.randn(2, d, width, generator=generator, dtype=torch.float64)
    jacobian = torch.autograd.functional.jacobian(
        lambda q, k: (_norm(x @ q.T) @ _norm(x @ k.T).T).flatten(), (q, k), vectorize=True
    )
    flat = torch.cat([j.flatten(1) for j in jacobian], dim=1)
    nothing = 2 * d * width - int(torch.linalg.matrix_rank(flat, rtol=1e-10))
    means, rotations, lengths = 2 * width, math.comb(d - 1, 2), 2
    assert nothing == means + rotations + lengths


def _norm(x: Tensor) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / x.norm(dim=-1, keepdim=True)


@pytest.mark.parametrize("name", ["head by head, biases", "without weights", "all heads at once"])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_score_is_the_same_whatever_the_means(name: str, metric: str) -> None:
    model, found = find(name)
    batches = [{"x": inputs(3)["x"]}]

    def measured(symmetries: str) -> float:
        return score(
            model, batches, metric=metric, symmetries=symmetries, rho=0.05, steps=5, loss=_loss, dtype="float64"
        ).geodesic_sharpness

    before, without = measured("full"), measured("attention")
    element = found.random_element(model, 0)
    kept = {n: p.detach().clone() for n, p in model.named_parameters()}
    folds = found.without({s.name: "" for s in found.symmetries if not isinstance(s, Mean)})
    for _ in range(3):  # once is a third as large as the weights
        folds.apply(model, element)
    try:
        assert measured("full") == pytest.approx(before, rel=1e-9)
        felt = abs(measured("attention") / without - 1)
        # Where rotations are left, the metric of a factor by itself does not feel it in any case.
        assert felt < 1e-9 if name == "without weights" else felt > 0.01
    finally:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(kept[n])


def _loss(outputs: Tensor, batch: object) -> Tensor:
    return (outputs[:, : TOKENS // 2] ** 2).mean((1, 2))


def test_the_attention_preset_has_none() -> None:
    found = find_symmetries(find("head by head")[0], inputs(), preset="attention")
    assert Counter(f.kind for f in found.folds) == Counter({"value_bias": 1})
