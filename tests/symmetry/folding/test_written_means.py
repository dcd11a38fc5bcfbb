"""Means of what is written that nothing sees: of which linear maps, and that no score feels them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from benchmarks import tiny
from hf_geosharp import score
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Mean
from hf_geosharp.symmetry.inputs import synthetic
from tests.symmetry.handmade import (
    WIDTH,
    Projected,
    Running,
    folded,
    holding,
    inputs,
    scores_along,
    there_and_back,
)

Forward = Callable[["Stream", Tensor], Tensor]


class Stream(Running):
    """A layer norm and what writes to it, and numbers."""

    beside = False

    def __init__(self, forward: Forward, **modules: nn.Module) -> None:
        scale = nn.Parameter(torch.ones(WIDTH))
        super().__init__(forward, norm=nn.LayerNorm(WIDTH), scale=scale, **modules)


@dataclass(frozen=True)
class Case:
    """A way that something is written, with the modules that it needs -> what of it has a mean that nothing sees."""

    forward: Forward
    writers: tuple[str, ...] = ()
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)

    def model(self) -> Stream:
        return Stream(self.forward, **{name: make() for name, make in self.modules.items()})


def linear(outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, bias=bias)


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)


def _layers(m: Stream, x: Tensor) -> Tensor:
    x = x + m.a(functional.layer_norm(x, (WIDTH,)))
    return m.norm(x + m.b(torch.tanh(m.c(m.norm(x)))))  # type: ignore[no-any-return]


def _routed(m: Stream, x: Tensor, count: int = 4) -> Tensor:
    best = m.a(x).topk(count, -1)
    shares = torch.zeros_like(m.a(x)).scatter(-1, best.indices, best.values.softmax(-1))
    return x + (shares.unsqueeze(-1) * m.b(x).unflatten(-1, (4, WIDTH))).sum(-2)


def _heads(m: Stream, x: Tensor) -> Tensor:
    return functional.layer_norm(m.a(x).unflatten(-1, (2, -1)), (WIDTH // 2,)).flatten(-2)


def _jumps(m: Stream, x: Tensor) -> Tensor:
    """What derivatives know nothing of: only experts whose logits are nearly as large as the largest have a share."""
    logits = m.a(x)
    with torch.no_grad():
        best = logits.amax(-1, keepdim=True)
        far = (best - logits) / logits.abs().clamp(min=best) > 0.02
    shares = logits.masked_fill(far, -torch.inf).softmax(-1)
    return x + (shares.unsqueeze(-1) * m.b(x).unflatten(-1, (4, WIDTH))).sum(-2)


def _attending_to_nothing(m: Stream, x: Tensor) -> Tensor:
    """The first token sees none, not even itself."""
    logits = x @ m.b(x).mT
    seen = torch.ones(logits.shape[-2:]).tril(-1).bool()
    shares = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
    return m.norm(x + m.a(shares @ x))  # type: ignore[no-any-return]


class _Never(torch.autograd.Function):
    """Has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()


class _Once(torch.autograd.Function):
    """Has a derivative, but none of that."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Never.apply(gradient)


class _Asserting(_Never):
    """Wants to be trained, as code does that computes its inputs anew on the way back."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise AssertionError("only in training")


def _compared(m: Stream, x: Tensor) -> Tensor:
    y = x + m.a(x)
    return m.norm(y) * (y > 0)  # type: ignore[no-any-return]


A, B = ("a.weight", "a.bias"), ("b.weight", "b.bias")
ONE, TWO = {"a": linear}, {"a": linear, "b": linear}
EXPERTS = {"a": lambda: linear(4), "b": lambda: linear(4 * WIDTH)}

CASES = {
    "to a stream that a layer norm reads": Case(lambda m, x: m.norm(x + m.a(x)), A, ONE),
    "without a bias": Case(lambda m, x: m.norm(x + m.a(x)), ("a.weight",), {"a": lambda: linear(bias=False)}),
    "a transposed weight": Case(lambda m, x: m.norm(x + m.a(x)), A, {"a": lambda: Conv1D(WIDTH, WIDTH)}),
    "a norm without weights": Case(lambda m, x: functional.layer_norm(x + m.a(x), (WIDTH,)), A, ONE),
    "before the residual": Case(lambda m, x: x + m.norm(m.a(x)), A, ONE),
    "attention": Case(lambda m, x: m.norm(x + m.a(x)), ("a.o.weight", "a.o.bias"), {"a": Projected}),
    "of several layers": Case(_layers, (*A, *B), {**TWO, "c": linear}),
    "a linear map twice": Case(lambda m, x: m.norm(m.a(m.norm(x + m.a(x)))), A, ONE),
    "beside tokens that attend to nothing": Case(_attending_to_nothing, A, TWO),
    "numbers that it is multiplied by": Case(lambda m, x: m.norm(x + m.scale * m.a(x)), (*A, "scale"), ONE),
    "to a router": Case(_routed, A, EXPERTS),
    "to a router, of the best": Case(lambda m, x: _routed(m, x, 2), A, EXPERTS),
    "to a router that looks at how large its logits are": Case(_jumps, (), EXPERTS),
    "what is compared with a number": Case(_compared, (), ONE),
    "a norm that takes out no mean": Case(lambda m, x: _rms(x + m.a(x)), (), ONE),
    "something else reads it": Case(lambda m, x: m.norm(y := x + m.a(x)) + torch.tanh(y), (), ONE),
    "a linear map reads it": Case(lambda m, x: m.norm(y := x + m.a(x)) + m.b(y), (), TWO),
    "an activation in between": Case(lambda m, x: m.norm(torch.tanh(m.a(x))), (), ONE),
    "what has no second derivative": Case(lambda m, x: m.norm(_Once.apply(x + m.a(x))), (), ONE),
    "what has no derivative": Case(lambda m, x: m.norm(_Never.apply(x + m.a(x))), (), ONE),
    "what asserts on the way back": Case(lambda m, x: m.norm(_Asserting.apply(x + m.a(x))), (), ONE),
    "head by head": Case(_heads, (), ONE),
    "shares that do not sum to one": Case(lambda m, x: x * m.a(x).sigmoid().sum(-1, keepdim=True), (), ONE),
    "logits that something else reads": Case(
        lambda m, x: x * (y := m.a(x)).softmax(-1) + y.tanh(), (), ONE
    ),
    "a part of it": Case(lambda m, x: m.norm(x + m.a(x)[..., :WIDTH]), (), {"a": lambda: linear(2 * WIDTH)}),
    "a linear map that is also used elsewhere": Case(lambda m, x: m.norm(x + m.a(x)) + m.a(x), (), ONE),
    "a weight that something else has": Case(lambda m, x: m.norm(m.a(x)) + torch.tanh(x @ m.a.weight), (), ONE),
    "a weight that is masked": Case(
        lambda m, x: m.norm(functional.linear(x, m.a.weight * torch.ones(WIDTH, WIDTH).tril())), (), ONE
    ),
    "numbers that something else reads": Case(
        lambda m, x: m.norm(x + m.scale * m.a(x)) + torch.tanh(m.scale), (), ONE
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def written(found: SymmetryMap) -> list[Mean]:
    return [f for f in found.folds if isinstance(f, Mean) and f.kind == "written_mean"]


def names(found: SymmetryMap) -> tuple[str, ...]:
    return tuple(p for f in written(found) for p in f.parameters)


@each_case
def test_means_are_nothing_or_something(name: str) -> None:
    """Not even a claim is made that the proof would have to refute: a score warns of those."""
    assert names(find_symmetries(CASES[name].model(), inputs(), prove=False)) == CASES[name].writers


@each_case
def test_the_same_is_found_where_numbers_are_all_alike(name: str) -> None:
    """As they begin. That numbers could be others does not show in their values then, but in the derivatives."""
    model = CASES[name].model()
    model.scale.data.fill_(1.0)
    assert names(find_symmetries(model, inputs(), prove=False)) == CASES[name].writers


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.writers])
def test_each_has_a_number_for_every_input_and_its_bias_and_holds(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    shapes = {n: p.shape for n, p in model.named_parameters()}
    for fold in written(found):
        inner = shapes[fold.parameters[0]].numel() // fold.views[0].width
        assert fold.dimension == inner + (len(fold.views) == 2)
    assert holding(model, found, written(found))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.writers])
def test_the_representative_has_no_mean_and_the_same_outputs(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    weights = folded(model, found)
    for fold in written(found):
        for view in fold.views:
            window = view.of(weights[view.parameter])
            assert float(window.mean(len(view.copies)).abs().max()) < 1e-12 * float(window.abs().max())


def test_there_and_back_is_where_it_began() -> None:
    model = CASES["numbers that it is multiplied by"].model()
    moved, left = there_and_back(model, inputs())
    assert moved > 0.1
    assert left < 1e-12


def test_numbers_of_zero_take_nothing_apart() -> None:
    """What is multiplied by zero is not seen at all."""
    model = CASES["numbers that it is multiplied by"].model()
    model.scale.data[1] = 0.0
    assert names(find_symmetries(model, inputs(), prove=False)) == ()


@pytest.mark.parametrize("family", ["bert", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_precision_of_the_weights_does_not_matter(family: str, dtype: torch.dtype) -> None:
    if family == "mixtral" and dtype == torch.bfloat16:
        pytest.skip("its grouped products are of single precision")
    wide, narrow = tiny.build(family).eval(), tiny.build(family, dtype=dtype).eval()
    expected = names(find_symmetries(wide, synthetic(wide), cached=False))
    assert expected
    assert names(find_symmetries(narrow, synthetic(narrow), cached=False)) == expected


@pytest.mark.parametrize("family", ["bert", "gpt2", "dinov2"])
def test_a_score_is_the_same_whatever_the_means(family: str) -> None:
    model = tiny.build(family).double().eval()
    before, after = scores_along(model, synthetic(model, tokens=9), "written_mean")
    assert after[0] == pytest.approx(before[0], rel=1e-7)
    assert abs(after[1] / before[1] - 1) > 1e-3


def test_a_score_is_the_same_whatever_is_added_to_all_rows_of_a_router() -> None:
    model = tiny.build("mixtral", dtype=torch.float32).eval()  # grouped products are of single precision
    batch = synthetic(model, tokens=9)

    def measured() -> float:
        return score(
            model, [batch], loss=lambda out, _: (out.last_hidden_state**2).mean((1, 2)), rho=0.3
        ).geodesic_sharpness  # fmt: skip

    before, value = model(**batch).last_hidden_state.detach(), measured()
    routers = [p for n, p in model.named_parameters() if n.endswith("gate.weight")]
    assert len(routers) == 2
    with torch.no_grad():
        for p in routers:
            p += 1.0
    assert torch.allclose(model(**batch).last_hidden_state, before, rtol=0, atol=1e-5)
    assert measured() == pytest.approx(value, rel=1e-4)


def test_what_has_no_derivative_takes_nothing_from_what_is_found_elsewhere() -> None:
    """Of the attention before it, say, all that is looked for without it."""

    def run(m: Stream, x: Tensor) -> Tensor:
        return m.norm(_Never.apply(x + m.a(m.norm(x))))  # type: ignore[no-any-return]

    found = find_symmetries(Stream(run, a=Projected()), inputs())
    assert {s.kind for s in found.symmetries} >= {"qk", "vo"}
    assert not found.unrecognised
