"""Constants that one parameter or another may hold: which go into which, and that no score feels where they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import StreamBias
from hf_geosharp.symmetry.inputs import synthetic
from tests.symmetry.handmade import (
    TOKENS,
    WIDTH,
    Projected,
    Running,
    folded,
    holding,
    inputs,
    scores_along,
    there_and_back,
)  # fmt: skip

Forward = Callable[["Stream", Tensor], Tensor]
PLACES = torch.arange(TOKENS)


class Stream(Running):
    """Linear maps and a norm, which takes out no mean unless it is a layer norm."""

    beside = False

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__(forward, gate=nn.Parameter(torch.ones(())), **parts)


class Rms(nn.Module):
    """A root-mean-square norm with a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2) * self.weight + self.bias


@dataclass(frozen=True)
class Case:
    """A way that constants are added -> which goes into which; ``dimension`` is that of each."""

    forward: Forward
    folds: Mapping[str, str] = field(default_factory=dict)
    parts: Mapping[str, Callable[[], nn.Module | nn.Parameter]] = field(default_factory=dict)
    dimension: int = WIDTH

    def model(self) -> Stream:
        return Stream(self.forward, **{name: make() for name, make in self.parts.items()})


def linear(bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def table(rows: int = TOKENS) -> nn.Embedding:
    return nn.Embedding(rows, WIDTH)


def vectors(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.zeros(shape))


def _post_norm(m: Stream, x: Tensor) -> Tensor:
    y = m.norm(x)
    return torch.tanh(y + m.a(torch.tanh(m.b(y))))


def _weighed(m: Stream, x: Tensor) -> Tensor:
    """By a mask that has no zeros in the example."""
    y = m.norm(x) * torch.ones(len(x), x.shape[1], 1, dtype=x.dtype)
    return torch.tanh(y + m.a(torch.tanh(m.b(y))))


def _begun_by(m: Stream, x: Tensor) -> Tensor:
    y = torch.cat([m.token.expand(len(x), 1, WIDTH), m.a(x)], 1) + m.places
    return torch.tanh(y)[:, 1:] + torch.tanh(y)[:, :1]


def _begun_by_a_row(m: Stream, x: Tensor) -> Tensor:
    y = torch.cat([m.token.expand(len(x), 1, WIDTH), m.a(x)], 1) + m.places(torch.arange(TOKENS + 1))
    return torch.tanh(y)[:, 1:] + torch.tanh(y)[:, :1]


NORM: dict[str, Callable[[], nn.Module | nn.Parameter]] = {"norm": Rms, "a": linear, "b": linear}
TWO: dict[str, Callable[[], nn.Module | nn.Parameter]] = {"a": linear, "b": linear}

CASES = {
    "a norm whose output is the residual": Case(_post_norm, {"norm.bias": "a.bias"}, NORM),
    "a layer norm": Case(_post_norm, {"norm.bias": "a.bias"}, {**NORM, "norm": lambda: nn.LayerNorm(WIDTH)}),
    "a norm that attention reads": Case(
        lambda m, x: torch.tanh((y := m.norm(x)) + m.a(y)), {"norm.bias": "a.o.bias"}, {"norm": Rms, "a": Projected}
    ),
    "two biases": Case(lambda m, x: torch.tanh(x + m.a(x) + m.b(x.tanh())), {"a.bias": "b.bias"}, TWO),
    "two biases, one times a number": Case(
        lambda m, x: torch.tanh(x + m.a(x) + 3 * m.b(x.tanh())), {"a.bias": "b.bias"}, TWO
    ),
    "two biases before a layer norm": Case(
        lambda m, x: torch.nn.functional.layer_norm(x + m.a(x) + m.b(x.tanh()), (WIDTH,)), {"a.bias": "b.bias"}, TWO,
        WIDTH - 1,
    ),
    "three biases": Case(
        lambda m, x: torch.tanh(m.a(x) + m.b(x.tanh()) + m.c(x * x)), {"a.bias": "b.bias", "b.bias": "c.bias"},
        {**TWO, "c": linear},
    ),
    "two tables": Case(
        lambda m, x: torch.tanh(x + m.a(PLACES % 3) + m.b(PLACES)), {"a.weight": "b.weight"},
        {"a": lambda: table(3), "b": table},
    ),
    "a bias and a table, of which not all is looked up": Case(
        lambda m, x: torch.tanh(m.a(x) + m.b(PLACES)), {"a.bias": "b.weight"}, {"a": linear, "b": lambda: table(99)}
    ),
    "a bias and vectors": Case(
        lambda m, x: torch.tanh(m.a(x) + m.b), {"a.bias": "b"}, {"a": linear, "b": vectors(1, TOKENS, WIDTH)}
    ),
    "a token and a bias, each in some of the vectors": Case(
        _begun_by, {"token": "places", "a.bias": "places"},
        {"a": linear, "token": vectors(1, 1, WIDTH), "places": vectors(1, TOKENS + 1, WIDTH)},
    ),
    "a token and a bias, each in some rows of a table": Case(
        _begun_by_a_row, {"token": "places.weight", "a.bias": "places.weight"},
        {"a": linear, "token": vectors(1, 1, WIDTH), "places": lambda: table(TOKENS + 1)},
    ),
    "some rows of a table of which others are not looked up": Case(
        _begun_by_a_row, {},
        {"a": linear, "token": vectors(1, 1, WIDTH), "places": lambda: table(TOKENS + 2)},
    ),
    "a norm that is multiplied": Case(_weighed, {}, NORM),
    "a reader without a bias": Case(_post_norm, {}, {**NORM, "b": lambda: linear(bias=False)}),
    "one more reader, without a bias": Case(
        lambda m, x: torch.tanh((y := m.norm(x)) + m.a(torch.tanh(m.b(y)) + torch.sin(m.c(y)))), {},
        {**NORM, "c": lambda: linear(bias=False)},
    ),
    "a reader of each head": Case(
        lambda m, x: torch.tanh((y := m.norm(x)) + m.a(torch.tanh(m.b(y)) * m.c(y.unflatten(-1, (4, -1))).sum(-2))), {},
        {**NORM, "c": lambda: nn.Linear(WIDTH // 4, WIDTH)},
    ),
    "a reader with an adapter": Case(
        lambda m, x: torch.tanh((y := m.norm(x)) + m.a(torch.tanh(m.b(y) + m.d(m.c(y))))), {},
        {**NORM, "c": lambda: nn.Linear(WIDTH, 2, bias=False), "d": lambda: nn.Linear(2, WIDTH, bias=False)},
    ),
    "no bias to go into": Case(_post_norm, {}, {**NORM, "a": lambda: linear(bias=False)}),
    "something reads it before the other": Case(
        lambda m, x: torch.tanh((y := x + m.a(x)) + m.b(torch.tanh(y))), {}, TWO
    ),
    "something reads the norm besides": Case(
        lambda m, x: torch.tanh((y := m.norm(x)) + m.a(torch.tanh(m.b(y)))) + torch.sin(y), {}, NORM
    ),
    "something reads it, and makes little of it": Case(
        lambda m, x: torch.tanh((y := x + m.a(x)) + 3e-4 * m.b(torch.tanh(y))), {}, TWO
    ),
    "times a parameter that is one": Case(lambda m, x: torch.tanh(m.a(x) + m.gate * m.b(x.tanh())), {}, TWO),
    "a bias that is used twice": Case(lambda m, x: torch.tanh(m.a(x) + m.b(x)) + m.a(x), {}, TWO),
    "two outputs": Case(lambda m, x: torch.tanh(m.a(x)) + torch.sin(m.b(x)), {}, TWO),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)
FOLDING = [name for name, case in CASES.items() if case.folds]


def constants(found: SymmetryMap) -> list[StreamBias]:
    return [f for f in found.folds if isinstance(f, StreamBias)]


@each_case
def test_constants_go_where_they_may(name: str) -> None:
    """Not even a claim is made that the proof would have to refute: a score warns of those."""
    model = CASES[name].model()
    model.gate.data.fill_(1.0)
    found = constants(find_symmetries(model, inputs(), prove=False))
    assert {f.bias.parameter: f.into.parameter for f in found} == CASES[name].folds
    assert all(f.dimension == CASES[name].dimension for f in found)


@pytest.mark.parametrize("name", FOLDING)
def test_they_hold_and_the_representative_has_none(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    assert len(constants(found)) == len(CASES[name].folds)
    assert holding(model, found, constants(found))
    weights = folded(model, found)
    for f in constants(found):
        window = f.bias.of(weights[f.bias.parameter])
        assert float((window.mean(-1) if f.bias.rows else window).abs().max()) < 1e-12
        assert len(f.fixed) == (not f.bias.rows)


@pytest.mark.parametrize("name", FOLDING)
def test_there_and_back_is_where_it_began(name: str) -> None:
    moved, left = there_and_back(CASES[name].model(), inputs())
    assert moved > 0.1
    assert left < 1e-12


def test_some_rows_are_those_that_hold_it() -> None:
    model = CASES["a token and a bias, each in some of the vectors"].model()
    found = {f.bias.parameter: f.into for f in constants(find_symmetries(model, inputs()))}
    marked = torch.zeros(1, TOKENS + 1, WIDTH)
    found["token"].of(marked).fill_(1)
    found["a.bias"].of(marked).fill_(2)
    assert torch.equal(marked[0, :, 0], torch.tensor([1.0, *[2.0] * TOKENS]))


def test_a_number_that_a_constant_is_multiplied_by_is_exact() -> None:
    """It is worked out of derivatives, which are rounded; the function must not move by that."""
    model = CASES["two biases, one times a number"].model()
    (fold,) = constants(find_symmetries(model, inputs()))
    assert fold.ratio == 1 / 3


@pytest.mark.parametrize("family", ["bert", "gpt_neox", "vit", "bart", "clip_text_model", "marian"])
def test_a_score_is_the_same_wherever_constants_are(family: str) -> None:
    model = tiny.build(family).double().eval()
    batch = synthetic(model, tokens=9)
    assert constants(find_symmetries(model, batch))
    before, after = scores_along(model, batch, "stream_bias")
    assert after[0] == pytest.approx(before[0], rel=1e-7)
    assert abs(after[1] / before[1] - 1) > 1e-5
