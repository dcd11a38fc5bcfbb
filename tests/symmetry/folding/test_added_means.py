"""Means of what is added as it is that nothing sees: of which parameters, and that no score feels them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import Mean
from hf_geosharp.symmetry.inputs import synthetic
from tests.symmetry.handmade import (
    TOKENS,
    WIDTH,
    Running,
    folded,
    holding,
    inputs,
    scores_along,
    there_and_back,
)

Forward = Callable[["Stream", Tensor], Tensor]
PLACES = torch.arange(TOKENS)


class Stream(Running):
    """A layer norm, and what is added before it."""

    beside = False

    def __init__(self, forward: Forward, **parts: nn.Module | nn.Parameter) -> None:
        super().__init__(forward, norm=nn.LayerNorm(WIDTH), **parts)


@dataclass(frozen=True)
class Case:
    """A way that something is added -> the parameters whose means nothing sees, with how many those are."""

    forward: Forward
    means: Mapping[str, int] = field(default_factory=dict)
    parts: Mapping[str, Callable[[], nn.Module | nn.Parameter]] = field(default_factory=dict)

    def model(self) -> Stream:
        return Stream(self.forward, **{name: make() for name, make in self.parts.items()})


def table(rows: int = TOKENS, width: int = WIDTH) -> nn.Embedding:
    return nn.Embedding(rows, width)


def vectors(*shape: int) -> Callable[[], nn.Parameter]:
    return lambda: nn.Parameter(torch.zeros(shape))


def _rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)


def _written_to(m: Stream, x: Tensor) -> Tensor:
    """In place, as code does that spares memory."""
    y = m.a(PLACES.expand(len(x), -1))
    y *= 0.5
    y += x
    return m.norm(y)  # type: ignore[no-any-return]


def _begun_by(m: Stream, x: Tensor) -> Tensor:
    y = torch.cat([m.token.expand(len(x), 1, WIDTH), x], 1)
    return m.norm(y + m.a)[:, 1:] + m.norm(y)[:, :1].mean(1, keepdim=True)  # type: ignore[no-any-return]


def _by_distance(m: Stream, x: Tensor, sink: bool = False) -> Tensor:
    """One head whose logits have a number for each distance."""
    logits = x @ x.mT / WIDTH + m.a(PLACES[:, None] - PLACES + TOKENS - 1).squeeze(-1)
    if sink:
        return (torch.cat([logits, torch.ones_like(logits[..., :1])], -1).softmax(-1)[..., :-1]) @ x
    return logits.softmax(-1) @ x


def _taken_from_a_parameter(m: Stream, x: Tensor) -> Tensor:
    logits = x @ x.mT / WIDTH + m.a[PLACES[:, None] - PLACES + TOKENS - 1, 0]
    return logits.softmax(-1) @ x


ROWS, DISTANCES = {"a.weight": TOKENS}, lambda: table(2 * TOKENS - 1, 1)
PATCHES = {"a": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding=1)}

CASES = {
    "a table": Case(lambda m, x: m.norm(x + m.a(PLACES)), ROWS, {"a": table}),
    "a table, some rows of which are not looked up": Case(
        lambda m, x: m.norm(x + m.a(PLACES)), {"a.weight": 3 * TOKENS}, {"a": lambda: table(3 * TOKENS)}
    ),
    "times a number": Case(lambda m, x: m.norm(x + 4 * m.a(PLACES)), ROWS, {"a": table}),
    "written to": Case(_written_to, ROWS, {"a": table}),
    "looked up twice": Case(lambda m, x: m.norm(m.a(PLACES) + m.norm(x + m.a(PLACES))), ROWS, {"a": table}),
    "vectors": Case(lambda m, x: m.norm(x + m.a), {"a": TOKENS}, {"a": vectors(1, TOKENS, WIDTH)}),
    "a vector": Case(lambda m, x: m.norm(x + m.a), {"a": 1}, {"a": vectors(WIDTH)}),
    "a token, and vectors": Case(
        _begun_by, {"token": 1, "a": TOKENS + 1}, {"token": vectors(1, 1, WIDTH), "a": vectors(1, TOKENS + 1, WIDTH)}
    ),
    "a convolution": Case(
        lambda m, x: m.norm(x + m.a(x.mT).mT), {"a.weight": 3 * WIDTH, "a.bias": 1}, PATCHES
    ),
    "one number for all distances": Case(_by_distance, {"a.weight": 1}, {"a": DISTANCES}),
    "the same of a parameter": Case(_taken_from_a_parameter, {"a": 1}, {"a": vectors(2 * TOKENS - 1, 1)}),
    "the bias of a norm": Case(lambda m, x: m.norm(x + m.a(x)), {"a.bias": 1}, {"a": lambda: nn.LayerNorm(WIDTH)}),
    "distances beside a sink": Case(lambda m, x: _by_distance(m, x, sink=True), {}, {"a": DISTANCES}),
    "a norm that takes out no mean": Case(lambda m, x: _rms(x + m.a(PLACES)), {}, {"a": table}),
    "something else reads it": Case(lambda m, x: m.norm(y := x + m.a(PLACES)) + torch.tanh(y), {}, {"a": table}),
    "a table that a linear map has": Case(
        lambda m, x: m.norm(x + m.a(PLACES)) + m.norm(x) @ m.a.weight.mT @ m.a.weight, {}, {"a": table}
    ),
    "an activation in between": Case(lambda m, x: m.norm(torch.tanh(x + m.a(PLACES))), {}, {"a": table}),
    "sums of rows": Case(
        lambda m, x: m.norm(x + functional.embedding_bag(PLACES.expand(TOKENS, -1), m.a.weight)), {}, {"a": table}
    ),
    "numbers that something is multiplied by": Case(lambda m, x: m.norm(x * m.a), {}, {"a": vectors(WIDTH)}),
    "numbers that a norm's rows are multiplied by": Case(
        lambda m, x: m.norm(functional.layer_norm(x, (WIDTH,)) * m.a), {}, {"a": vectors(1, TOKENS, 1)}
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)


def means(found: SymmetryMap) -> list[Mean]:
    return [f for f in found.folds if isinstance(f, Mean) and f.kind == "written_mean"]


def dimensions(found: SymmetryMap) -> dict[str, int]:
    return {v.parameter: v.count * v.height for f in means(found) for v in f.views}


@each_case
@pytest.mark.parametrize("alike", [False, True], ids=["random", "all ones"])
def test_means_are_nothing_or_something(name: str, alike: bool) -> None:
    """Also where numbers are all alike, as they begin."""
    model = CASES[name].model()
    if alike and isinstance(getattr(model, "a", None), nn.Parameter):
        model.a.data.fill_(1.0)
    assert dimensions(find_symmetries(model, inputs(), prove=False)) == CASES[name].means


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.means])
def test_they_hold_and_the_representative_has_none(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    assert holding(model, found, means(found))
    weights = folded(model, found)
    for view in (v for fold in means(found) for v in fold.views):
        window = view.of(weights[view.parameter])
        assert float(window.mean(0).abs().max()) < 1e-12


def test_there_and_back_is_where_it_began() -> None:
    moved, left = there_and_back(CASES["a convolution"].model(), inputs())
    assert moved > 0.1
    assert left < 1e-12


def test_a_table_that_two_modules_have_keeps_its_means() -> None:
    """As that of an output layer tied to it, which would feel them."""
    model = CASES["a table"].model()
    model.b = nn.Linear(WIDTH, TOKENS, bias=False)
    model.b.weight = model.a.weight
    assert dimensions(find_symmetries(model, inputs(), prove=False)) == {}


@pytest.mark.parametrize("family", ["vit", "gpt2", "t5"])
def test_a_score_is_the_same_whatever_the_means(family: str) -> None:
    model = tiny.build(family).double().eval()
    before, after = scores_along(model, synthetic(model, tokens=9), "written_mean")
    assert after[0] == pytest.approx(before[0], rel=1e-7)
    assert abs(after[1] / before[1] - 1) > 1e-5
