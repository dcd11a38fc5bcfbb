"""Numbers that the output of a linear map is multiplied by: which fold into it, and that no score feels them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import LayerScale
from hf_geosharp.symmetry.inputs import output_tensors, synthetic
from hf_geosharp.symmetry.verify import verify
from tests.symmetry.handmade import WIDTH, Projected, Running, inputs, outputs

Forward = Callable[["Scaling", Tensor], Tensor]


class Scaling(Running):
    """Linear maps and a vector of numbers."""

    def __init__(self, forward: Forward, *shape: int, **modules: nn.Module) -> None:
        super().__init__(forward, scale=nn.Parameter(torch.ones(shape)), **modules)


@dataclass(frozen=True)
class Case:
    """A way that numbers are used, with the modules that it needs -> the parameters that they fold into."""

    forward: Forward
    writers: tuple[str, ...] = ()
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    shape: tuple[int, ...] = (WIDTH,)

    def model(self) -> Scaling:
        return Scaling(self.forward, *self.shape, **{name: make() for name, make in self.modules.items()})


def linear(outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, bias=bias)


A, B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
ONE, TWO = {"a": linear}, {"a": linear, "b": linear}


def _channels_first(m: Scaling, x: Tensor) -> Tensor:
    return (m.a(x).mT * m.scale[:, None]).mT  # type: ignore[no-any-return, operator]


def _as_many_tokens(m: Scaling, x: Tensor) -> Tensor:
    """Numbers of tokens, of which there are as many as features."""
    y = m.a(x.repeat(1, WIDTH, 1)[:, :WIDTH])  # type: ignore[operator]
    return (y * m.scale[:, None])[:, : x.shape[1]]  # type: ignore[no-any-return]


CASES = {
    "one for each feature": Case(lambda m, x: m.scale * m.a(x), A, ONE),
    "on the right": Case(lambda m, x: m.a(x) * m.scale, A, ONE),
    "in place": Case(lambda m, x: m.a(x).mul_(m.scale), A, ONE),
    "without a bias": Case(lambda m, x: m.scale * m.a(x), ("a.weight",), {"a": lambda: linear(bias=False)}),
    "one for all": Case(lambda m, x: m.scale * m.a(x), A, ONE, (1,)),
    "one for all, a number": Case(lambda m, x: m.scale * m.a(x), A, ONE, ()),
    "one for all, of several": Case(lambda m, x: m.scale[0] * m.a(x), (), ONE),
    "one for each feature, with axes of tokens": Case(lambda m, x: m.scale * m.a(x), A, ONE, (1, 1, WIDTH)),
    "a transposed weight": Case(lambda m, x: m.scale * m.a(x), A, {"a": lambda: Conv1D(WIDTH, WIDTH)}),
    "attention": Case(lambda m, x: m.scale * m.a(x), ("a.o.weight", "a.o.bias"), {"a": Projected}),
    "channels first": Case(_channels_first, A, ONE),
    "another type": Case(lambda m, x: m.a(x) * m.scale.float().double(), (), ONE),
    "dropout in between": Case(lambda m, x: m.scale * functional.dropout(m.a(x), 0.5, m.training), A, ONE),
    "tokens in another order": Case(lambda m, x: m.scale * m.a(x).flip(1), (), ONE),
    "several linear maps": Case(
        lambda m, x: m.scale * m.a(x) + torch.tanh(m.scale * m.b(x)), (*A, *B), TWO
    ),
    "a linear map twice": Case(lambda m, x: m.scale * m.a(torch.tanh(m.scale * m.a(x))), A, ONE),
    "numbers that something else reads": Case(lambda m, x: m.scale * m.a(x) + m.scale, (), ONE),
    "numbers that scale something else": Case(lambda m, x: m.scale * m.a(x) + m.scale * x, (), ONE),
    "what something else reads": Case(lambda m, x: m.scale * (y := m.a(x)) + torch.tanh(y), (), ONE),
    "what a linear map reads": Case(lambda m, x: m.scale * (y := m.a(x)) + m.b(y), (), TWO),
    "a linear map that is also used without": Case(lambda m, x: m.scale * m.a(x) + m.a(x.flip(1)), (), ONE),
    "a weight that something else has": Case(
        lambda m, x: m.scale * m.a(x) + torch.tanh(x @ m.a.weight), (), ONE
    ),
    "not the numbers themselves": Case(lambda m, x: torch.tanh(m.scale) * m.a(x), (), ONE),
    "one more": Case(lambda m, x: (1 + m.scale) * m.a(x), (), ONE),
    "an activation in between": Case(lambda m, x: m.scale * torch.tanh(m.a(x)), (), ONE),
    "something added in between": Case(lambda m, x: m.scale * (m.a(x) + x), (), ONE),
    "numbers of tokens": Case(_as_many_tokens, (), ONE),
    "features turned around": Case(lambda m, x: m.scale * m.a(x).flip(-1), (), ONE),
    "a half of the outputs": Case(lambda m, x: m.scale * m.a(x)[..., :WIDTH], (), {"a": lambda: linear(2 * WIDTH)}),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def scales(found: SymmetryMap) -> list[LayerScale]:
    return [f for f in found.folds if isinstance(f, LayerScale)]


@each_case
def test_numbers_fold_into_what_they_multiply_or_not_at_all(name: str) -> None:
    """Not even a claim is made that the proof would have to refute: a score warns of those."""
    case = CASES[name]
    found = find_symmetries(case.model(), inputs(), prove=False)
    assert tuple(p for f in scales(found) for p in f.parameters[1:]) == case.writers
    assert all(
        (f.parameters[0], f.dimension, f.name) == ("scale", math.prod(case.shape), "layer_scale") for f in scales(found)
    )


@pytest.mark.parametrize("name", [name for name in CASES if name != "another type"])
def test_numbers_that_are_all_alike_fold_where_others_do(name: str) -> None:
    """As they begin: that each has the output of its own place does not show in their values then.

    Nor does rounding to another type, which ones are left as they are by.
    """
    case = CASES[name]
    model = case.model()
    model.scale.data.fill_(1.0)
    found = find_symmetries(model, inputs(), prove=False)
    assert tuple(p for f in scales(found) for p in f.parameters[1:]) == case.writers


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.writers])
def test_they_hold_on_the_model_and_the_representative_has_ones(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    proof = verify(model, found, [inputs(1), inputs(2)], each=True)
    assert proof.map == found
    assert all((c.deviation or 0.0) < 1e-12 and (c.control or 0.0) > 1e-4 for c in proof.claims)
    before = outputs(model, inputs(1))
    (fold,) = scales(found)
    with torch.no_grad():
        fold.canonicalise(dict(model.named_parameters()))
    assert torch.equal(model.scale, torch.ones_like(model.scale))
    torch.testing.assert_close(outputs(model, inputs(1)), before, rtol=1e-11, atol=1e-11)
    element = found.random_element(model, 1)
    there = {n: p.detach().clone() for n, p in model.named_parameters()}
    found.apply(model, element)
    assert not torch.equal(model.scale, torch.ones_like(model.scale))
    found.apply(model, found.inverse(element), back=True)
    assert all(torch.allclose(there[n], p, rtol=1e-12, atol=1e-13) for n, p in model.named_parameters())


def test_numbers_between_two_linear_maps_are_counted_once() -> None:
    """They fold into the second one, like a norm's; that the first one could take them is a matter of its units."""
    model = Scaling(lambda m, x: m.b(m.scaled(m.a(x))), WIDTH, a=linear(), b=linear(), scaled=_Module())  # type: ignore[operator]
    found = find_symmetries(model, inputs())
    assert [f.parameters[0] for f in found.folds] == ["scaled.scale"]
    assert found.dimension == WIDTH + sum(p.dimension for p in found.pairs)


class _Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("family", ["dinov2", "beit", "convnext"])
def test_families_have_them_in_each_layer(family: str) -> None:
    model = tiny.build(family)
    names = {n for n, p in model.named_parameters() if "lambda" in n or "layer_scale" in n}
    found = find_symmetries(model, synthetic(model))
    assert {f.scale.parameter for f in scales(found)} == names != set()


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_a_score_does_not_feel_where_they_are(metric: str) -> None:
    def loss(outputs: object, batch: Mapping[str, Tensor]) -> Tensor:
        first = output_tensors(outputs)[0]
        return (first - torch.arange(first.shape[-1], dtype=first.dtype).cos()).square().mean()

    model = tiny.build("dinov2")
    batch = synthetic(model)
    settings = {"metric": metric, "rho": 0.01, "steps": 3, "loss": loss, "dtype": "float64", "reproducibility": False}
    before = score(model, [batch], **settings)  # type: ignore[arg-type]
    assert before.pairs.folded["layer_scale"] == 2 * 2
    found = find_symmetries(model, batch)
    moves = {
        s.name: s.random(dict(model.named_parameters()), torch.Generator().manual_seed(0), 10.0) for s in scales(found)
    }
    with torch.no_grad():
        for fold in scales(found):
            fold.apply(dict(model.named_parameters()), moves[fold.name])
    after = score(model, [batch], **settings)  # type: ignore[arg-type]
    assert after.base_loss == pytest.approx(before.base_loss, rel=1e-11)
    assert after.geodesic_sharpness == pytest.approx(before.geodesic_sharpness, rel=1e-7)
