"""What a chart keeps between a point and the gradient there, and how much of it at a time."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_geosharp.geometry.space import Recipe, Tangent, Vector
from hf_geosharp.sharpness.ascent import auto_pgd
from hf_geosharp.sharpness.ball import loss_at
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.sharpness.objective import Objective
from hf_geosharp.sharpness.stacks import stacked
from hf_geosharp.symmetry.find import find_symmetries
from hf_geosharp.symmetry.map import SymmetryMap
from hf_geosharp.symmetry.views import View
from tests.families import batch_of, build
from tests.sharpness.tiny import HEAD, WIDTH, TinyAttention, attention_data, attention_map, columns_map

GEOMETRIES = [Geometry(metric, order) for metric in ("inv", "mix") for order in ("first", "second", "exact")] + [
    Geometry("adaptive", "exact"), Geometry("euclidean", "first")
]  # fmt: skip


def gradient_at(chart: Chart, objective: Objective, u: Vector) -> tuple[float, Tangent]:
    chart.write(u)
    return objective.evaluate(True), chart.pull()


def there(chart: Chart, length: float = 0.1) -> tuple[Recipe, Tangent]:
    """A recipe of a point in the ball, and the point."""
    u, v = (chart.space.random(torch.Generator().manual_seed(seed)) for seed in (0, 1))
    recipe = Recipe(((u, 1.0), (v, -0.5)), length / chart.space.norm(u))
    return recipe, Tangent(tuple(recipe.piece(i) for i in range(len(chart.space.parts))))


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=lambda g: f"{g.metric}-{g.geodesic}")
@pytest.mark.parametrize("isometric", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_velocity_that_nobody_keeps_gives_the_same_weights_and_gradient(
    name: str, isometric: bool, geometry: Geometry
) -> None:
    model = build(name)
    symmetries = find_symmetries(model, batch_of(name))
    # As where a norm leaves no more than rotations.
    groups = [replace(p.group, isometric=isometric or p.group.isometric) for p in symmetries.pairs]
    pairs = tuple(replace(p, group=group) for p, group in zip(symmetries.pairs, groups, strict=True))
    symmetries = replace(symmetries, pairs=pairs)
    with borrow(model) as borrowed:
        chart = Chart(borrowed, symmetries, geometry)
        objective = Objective(model, batch_of(name))
        recipe, point = there(chart)
        kept = gradient_at(chart, objective, point)
        made = gradient_at(chart, objective, recipe)
    assert made[0] == kept[0]
    assert all(torch.equal(a, b) for a, b in zip(made[1].pieces, kept[1].pieces, strict=True))


def test_between_point_and_gradient_nothing_of_a_recipe_is_kept() -> None:
    model = build("llama")
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch_of("llama")), Geometry("inv", "second"))
        made: weakref.WeakSet[Tensor] = weakref.WeakSet()

        class Watched(Recipe):
            def piece(self, part: int, out: Tensor | None = None) -> Tensor:
                piece = super().piece(part, out)
                made.add(piece.untyped_storage())
                return piece

        def left() -> set[int]:
            """What there is beside the weights, and the memory that all parts share."""
            shared = [*chart._workspaces.values(), *(leaf.tensor for leaf in chart.leaves.values())]
            return {s.data_ptr() for s in made} - {x.untyped_storage().data_ptr() for x in shared}

        chart.write(Watched(there(chart)[0].terms, 0.01))
        assert not left()
        assert len(chart._workspaces) == 2
        assert max(x.numel() for x in chart._workspaces.values()) < chart.space.size / 2
        Objective(model, batch_of("llama")).evaluate(True)
        chart.pull()
        assert not left()


def test_a_recipe_that_is_kept_between_point_and_gradient_gives_the_same_gradient() -> None:
    """Its first vector may become the point, and the others something else."""
    model = build("llama")
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch_of("llama")), Geometry("inv", "second"))
        objective = Objective(model, batch_of("llama"))
        recipe, point = there(chart)
        _, expected = gradient_at(chart, objective, recipe)
        chart.write(recipe)
        objective.evaluate(True)
        first, second = (vector for vector, _ in recipe.terms)
        assert chart.space.keep(recipe, first) is recipe.kept is first
        second.mul_(0.0)
        found = chart.pull()
    assert torch.equal(first.flat(), point.flat())
    assert torch.equal(found.flat(), expected.flat())


@pytest.mark.parametrize("wanted", [False, True])
def test_whether_a_gradient_is_wanted_is_asked_once_when_the_loss_is_known(wanted: bool) -> None:
    model = build("llama")
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch_of("llama")), Geometry("inv", "second"))
        objective = Objective(model, batch_of("llama"))
        point = there(chart)[1]
        expected = gradient_at(chart, objective, point)
        heard: list[float] = []

        def answer(loss: float) -> bool:
            heard.append(loss)
            assert all(p.grad is None for p in model.parameters())
            return wanted

        loss, g = loss_at(chart, objective, point, answer)
        assert heard == [loss] == [expected[0]]
        assert (g is not None) == wanted
        assert g is None or torch.equal(g.flat(), expected[1].flat())
        assert (objective.forwards, objective.backwards) == (2, 1 + wanted)
        assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("name", ["gpt2", "llama", "t5"])
def test_pairs_come_in_stacks_of_bounded_size_and_their_gradients_go_with_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    symmetries = find_symmetries(model, batch_of(name))
    results = []
    for largest in (1 << 30, 1):
        monkeypatch.setattr("hf_geosharp.sharpness.stacks._LARGEST", largest)
        sizes = [len(b.pairs) for b in stacked([symmetries.coordinates(p) for p in symmetries.pairs])]
        assert (max(sizes) > 1) == (largest > 1)
        with borrow(model) as borrowed:
            chart = Chart(borrowed, symmetries, Geometry("mix", "second"))
            objective = Objective(model, batch_of(name))
            g = gradient_at(chart, objective, chart.space.zeros())[1]
            g.mul_(0.1 / chart.space.norm(g))
            chart.write(g)
            loss = objective.evaluate(True)
            left = _grads_when_stacks_are_read(chart, monkeypatch)
            h = chart.pull()
            results.append((loss, chart.space.norm(h), chart.share(h)))
            assert all(p.grad is None for p in model.parameters())
            # With each stack that is read fewer parameters have a gradient.
            assert left == sorted(left, reverse=True)
            assert left[-1] < left[0] or len(left) == 1
    (loss, size, share), (again, other, parts) = results
    assert (again, other) == pytest.approx((loss, size), rel=1e-12)
    assert parts == pytest.approx(share, rel=1e-9, abs=1e-15)


def _grads_when_stacks_are_read(chart: Chart, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parameters have a gradient each time that a stack of pairs reads its own."""
    counts: list[int] = []
    read = type(chart._bound[0]).read

    def counted(self: Any, tensors: Any, outs: Any) -> None:
        counts.append(sum(p.grad is not None for p in chart.model.parameters()))
        read(self, tensors, outs)

    monkeypatch.setattr(type(chart._bound[0]), "read", counted)
    return counts


class Fused(nn.Module):
    """As :class:`TinyAttention`, but the queries and the values lie in one parameter, and only the former in a pair."""

    def __init__(self, parts: TinyAttention) -> None:
        super().__init__()
        self.qv = nn.Parameter(torch.cat([parts.q.weight, parts.v.weight]).detach())
        self.bias, self.k, self.o, self.readout = parts.q.bias, parts.k, parts.o, parts.readout

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        q, v = x @ self.qv[:HEAD].mT + self.bias, x @ self.qv[HEAD:].mT
        mixed = torch.softmax(q @ self.k(x).mT / HEAD**0.5, dim=-1) @ v
        y = self.readout(torch.tanh(x + self.o(mixed)).mean(1))
        return SimpleNamespace(loss=nn.functional.cross_entropy(y, labels), logits=y)


@pytest.mark.parametrize("small", [0, 1 << 17])
@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_parameter_that_is_only_in_part_in_pairs_is_as_two(
    metric: str, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is bundled with others or not."""
    monkeypatch.setattr("hf_geosharp.sharpness.loose._SMALL", small)
    whole = TinyAttention()
    pair = attention_map().pairs[0]
    rows = View.pattern(
        "qv", (("s", "n", "h"), ("i",)), {"s": 2, "n": 1, "h": HEAD, "i": WIDTH}, ("n",), ("h",), ("i",),
        select={"s": 0},
    )  # fmt: skip
    bias = replace(pair.g[1], parameter="bias")
    maps = SymmetryMap((pair,)), SymmetryMap((replace(pair, g=(rows, bias)),))
    found = []
    for model, symmetries in zip((whole, Fused(whole)), maps, strict=True):
        with borrow(model) as borrowed:
            chart = Chart(borrowed, symmetries, Geometry(metric, "second"))
            objective = Objective(model, attention_data())
            climb = auto_pgd(chart.space, partial(loss_at, chart, objective), 0.3, 10)
            found.append((climb.rise, chart.space.dimension, chart.space.norm(climb.u)))
    assert found[1] == pytest.approx(found[0], rel=1e-12)
    assert found[0][0] > 0.01


class Gains(nn.Module):
    """Two gains after each other; the first one is stored less ``offset``, as that of a norm may be."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.offset = offset
        self.a, self.b = (nn.Parameter(torch.tensor(x).double()) for x in ([1.5, -0.5, 2.0], [0.5, 1.0, -1.5]))
        with torch.no_grad():
            self.a -= offset

    def forward(self, x: Tensor, labels: Tensor) -> SimpleNamespace:
        y = ((self.offset + self.a) * x[:, 0] * self.b).sum(-1)
        return SimpleNamespace(loss=(y - labels).square().mean(), logits=y)


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_gain_that_is_stored_less_one_is_as_the_gain_itself(metric: str) -> None:
    pair = columns_map("a", "b", 3).pairs[0]
    shifted = replace(pair, g=(replace(pair.g[0], shift=1.0),))
    rises = []
    for offset, one in ((0.0, pair), (1.0, shifted)):
        model = Gains(offset)
        with borrow(model) as borrowed:
            chart = Chart(borrowed, SymmetryMap((one,)), Geometry(metric, "second"))
            objective = Objective(model, attention_data())
            rises.append(auto_pgd(chart.space, partial(loss_at, chart, objective), 0.3, 10).rise)
    assert rises[1] == pytest.approx(rises[0], rel=1e-12)
    assert rises[0] > 0.01
