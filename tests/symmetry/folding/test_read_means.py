"""Means of what reads a norm that takes them out: of which linear maps, and that no score feels them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.fold import ReadMean
from hf_geosharp.symmetry.inputs import synthetic
from tests.families import batch_of, build
from tests.symmetry.handmade import (
    TOKENS,
    WIDTH,
    Norm,
    Projected,
    Running,
    folded,
    holding,
    inputs,
    scores_along,
    there_and_back,
)
from tests.symmetry.hidden.test_experts import COUNT, UNITS, Fused

Forward = Callable[["Reading", Tensor], Tensor]


class Reading(Running):
    """A norm and what reads it, and numbers."""

    def __init__(self, forward: Forward, norm: nn.Module | None = None, **modules: nn.Module) -> None:
        norm = nn.LayerNorm(WIDTH) if norm is None else norm
        super().__init__(forward, norm=norm, scale=nn.Parameter(torch.ones(WIDTH)), **modules)


@dataclass(frozen=True)
class Case:
    """A way to read a norm, with the modules that it needs -> weights of which a mean is nothing, how many numbers."""

    forward: Forward
    readers: tuple[str, ...] = ()
    dimension: int = 0
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    norm: Callable[[], nn.Module] | None = None

    def model(self) -> Reading:
        return Reading(self.forward, self.norm and self.norm(), **{name: make() for name, make in self.modules.items()})


def linear(outputs: int = WIDTH, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, outputs, bias=bias)


def without_bias() -> nn.Module:
    return nn.LayerNorm(WIDTH, bias=False)


class Offset(nn.Module):
    """A layer norm that multiplies by 1 + weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return functional.layer_norm(x, (WIDTH,), 1 + self.weight, self.bias)


def _convolved(m: Reading, x: Tensor) -> Tensor:
    return m.a(m.norm(x).mT).mT  # type: ignore[no-any-return]


def _two(m: Reading, x: Tensor) -> Tensor:
    y, weight, bias = m.norm(x), m.a.weight, m.a.bias
    first = functional.linear(y, weight[:WIDTH], bias[:WIDTH])  # type: ignore[index]
    return first + torch.tanh(functional.linear(x, weight[WIDTH:], bias[WIDTH:]))  # type: ignore[index]


def _left_out(m: Reading, x: Tensor) -> Tensor:
    keep = (torch.arange(TOKENS) < TOKENS - 2).double()[:, None]
    return m.a(m.norm(x) * keep)  # type: ignore[no-any-return]


ONE, TWO = {"a": linear}, {"a": linear, "b": linear}
A, B = ("a.weight",), ("b.weight",)

CASES = {
    "a linear map": Case(lambda m, x: m.a(m.norm(x)), A, WIDTH, ONE),
    "a transposed weight": Case(lambda m, x: m.a(m.norm(x)), A, WIDTH, {"a": lambda: Conv1D(WIDTH, WIDTH)}),
    "several": Case(lambda m, x: m.a(y := m.norm(x)) + torch.tanh(m.b(y)), (*A, *B), 2 * WIDTH, TWO),
    "the residual reads the norm, too": Case(lambda m, x: (y := m.norm(x)) + m.a(y), A, WIDTH, ONE),
    "and another linear map, something else": Case(
        lambda m, x: (y := m.norm(x)) + m.a(y) + torch.tanh(m.b(x)), A, WIDTH, TWO
    ),
    "neither has a bias": Case(
        lambda m, x: m.a(m.norm(x)), A, WIDTH, {"a": lambda: linear(bias=False)}, without_bias
    ),
    "the norm has no bias": Case(lambda m, x: m.a(m.norm(x)), A, WIDTH, ONE, without_bias),
    "the norm has no weights": Case(lambda m, x: m.a(functional.layer_norm(m.b(x), (WIDTH,))), A, WIDTH, TWO),
    "one and its weights": Case(lambda m, x: m.a(m.norm(x)), A, WIDTH, ONE, Offset),
    "one and its weights, and the residual": Case(lambda m, x: (y := m.norm(x)) + m.a(y), A, WIDTH, ONE, Offset),
    "attention": Case(
        lambda m, x: m.a(m.norm(x)), ("a.q.weight", "a.k.weight", "a.v.weight"), 3 * WIDTH, {"a": Projected}
    ),
    "rows of a parameter": Case(_two, A, WIDTH, {"a": lambda: linear(2 * WIDTH)}),
    "a convolution": Case(
        _convolved, A, 3 * WIDTH, {"a": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding="same")}, without_bias
    ),
    "a convolution within": Case(
        lambda m, x: functional.pad(_convolved(m, x), (0, 0, 1, 1)), A, 3 * WIDTH,
        {"a": lambda: nn.Conv1d(WIDTH, WIDTH, 3)},
    ),
    "rows that are averaged": Case(
        lambda m, x: m.a(m.norm(x).mean(1, keepdim=True)), A, WIDTH, {"a": lambda: linear(bias=False)}, without_bias
    ),
    "experts, some of which no token reaches": Case(
        lambda m, x: m.a(m.norm(x)), ("a.experts.gate_up",), COUNT * 2 * UNITS, {"a": lambda: Fused((0, 2))},
        without_bias,
    ),
    "experts, one of which bends what it reads": Case(
        lambda m, x: m.a(m.norm(x)), (), 0, {"a": lambda: Fused((0, 2), bent=1)}, without_bias
    ),
    "rows that are left out": Case(_left_out, A, WIDTH, ONE, without_bias),
    "rows that are left out, and a bias": Case(_left_out, (), 0, ONE),
    "a norm that takes out no mean": Case(lambda m, x: m.a(m.norm(x)), (), 0, ONE, Norm),
    "that, of what has none": Case(lambda m, x: m.a(m.norm(x - x.mean(-1, keepdim=True))), (), 0, ONE, Norm),
    "of what has none at these weights": Case(lambda m, x: m.a(m.norm(m.b(x))), (), 0, TWO, Norm),
    "what has none at these weights": Case(lambda m, x: m.a(m.b(x)), (), 0, TWO),
    "a bias that nothing takes back": Case(lambda m, x: m.a(m.norm(x)), (), 0, {"a": lambda: linear(bias=False)}),
    "numbers that it is multiplied by": Case(lambda m, x: m.a(m.norm(x) * m.scale), (), 0, ONE, without_bias),
    "something added": Case(lambda m, x: m.a(m.norm(x) + x), (), 0, ONE),
    "an activation": Case(lambda m, x: m.a(torch.tanh(m.norm(x))), (), 0, ONE),
    "a part of the features": Case(
        lambda m, x: m.a(m.norm(x)[..., : WIDTH // 2]), (), 0, {"a": lambda: nn.Linear(WIDTH // 2, WIDTH)}
    ),
    "one map of two things": Case(lambda m, x: m.a(m.norm(x)) + torch.tanh(m.a(x)), (), 0, ONE),
    "a weight that is masked": Case(
        lambda m, x: functional.linear(m.norm(x), m.a.weight * torch.ones(WIDTH, WIDTH).tril()), (), 0, ONE
    ),
    "a convolution of each channel by itself": Case(
        _convolved, (), 0, {"a": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding="same", groups=WIDTH)}, without_bias
    ),
    "a convolution among zeros, and a bias": Case(
        _convolved, (), 0, {"a": lambda: nn.Conv1d(WIDTH, WIDTH, 3, padding="same")}
    ),
}  # fmt: skip
each_case = pytest.mark.parametrize("name", CASES)
OWN = [name for name, case in CASES.items() if case.readers]


def centred(model: nn.Module) -> None:
    """Takes the mean out of what b writes, as tools do that prepare models for interpretation."""
    with torch.no_grad():
        for p in model.b.parameters() if hasattr(model, "b") else ():
            p -= p.mean(0, keepdim=True)


def read(found: SymmetryMap) -> list[ReadMean]:
    return [f for f in found.folds if isinstance(f, ReadMean)]


def names(found: SymmetryMap) -> tuple[str, ...]:
    return tuple(v.parameter for f in read(found) for v in f.views)


@each_case
@pytest.mark.parametrize("prepare", [False, True], ids=["", "centred"])
def test_means_are_nothing_or_something(name: str, prepare: bool) -> None:
    """Not even a claim is made that the proof would have to refute: a score warns of those."""
    model = CASES[name].model()
    if prepare:
        centred(model)
    found = find_symmetries(model, inputs(), prove=False)
    assert names(found) == CASES[name].readers
    assert sum(f.dimension for f in read(found)) == CASES[name].dimension


@each_case
def test_the_same_is_found_where_gains_are_one_and_biases_zero(name: str) -> None:
    """As they begin. That numbers could be others does not show in their values then."""
    model = CASES[name].model()
    with torch.no_grad():
        model.scale.fill_(1.0)
        for n, p in model.norm.named_parameters():
            p.fill_(1.0 if n == "weight" and getattr(model.norm, "offset", 0.0) == 0.0 else 0.0)
        if isinstance(model.norm, Offset):
            model.norm.weight.zero_()
    assert names(find_symmetries(model, inputs(), prove=False)) == CASES[name].readers


@pytest.mark.parametrize("name", OWN)
def test_each_claim_holds_and_breaks_when_broken(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    assert holding(model, found, read(found))


@pytest.mark.parametrize("name", OWN)
def test_the_representative_has_no_mean_and_the_same_outputs(name: str) -> None:
    model = CASES[name].model()
    found = find_symmetries(model, inputs())
    weights = folded(model, found)
    ones = {f.gain for f in read(found)} & {v.parameter for v in found.fixed}
    for fold in read(found):
        v = torch.ones(WIDTH, dtype=torch.float64)
        if fold.gain is not None and fold.gain not in ones:
            v = 1 / (weights[fold.gain] + fold.offset)
        for view in fold.views:
            window = view.of(weights[view.parameter])
            along = torch.tensordot(v, window, dims=1)
            assert float(along.abs().max()) < 1e-12 * float(window.abs().max()) * float(v.abs().max())


@pytest.mark.parametrize("name", ["a linear map", "the residual reads the norm, too", "attention"])
def test_there_and_back_is_where_it_began(name: str) -> None:
    model = CASES[name].model()
    moved, left = there_and_back(model, inputs())
    assert moved > 0.1
    assert left < 1e-10 * moved


def test_a_gain_of_zero_has_no_units() -> None:
    """Only where it stays a parameter: a gain that folds is one afterwards, but the move needs it before."""
    model = CASES["the residual reads the norm, too"].model()
    model.norm.weight.data[1] = 0.0  # type: ignore[union-attr, operator]
    assert names(find_symmetries(model, inputs(), prove=False)) == ()


def test_where_a_gain_is_zero_what_was_found_before_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_GEOSHARP_CACHE", str(tmp_path))
    model, batch = build("bert"), batch_of("bert")
    before = read(find_symmetries(model, batch))
    model.bert.embeddings.LayerNorm.weight.data[1] = 0.0
    assert [f.name for f in read(find_symmetries(model, batch))] == [f.name for f in before[1:]]
    assert before[0].module == "bert.embeddings.LayerNorm"


def test_what_both_reads_a_norm_and_writes_to_one_is_counted_once() -> None:
    def layers(m: Reading, x: Tensor) -> Tensor:
        return functional.layer_norm(m.a(m.norm(x)), (WIDTH,))

    found = find_symmetries(Reading(layers, a=linear()), inputs())
    dimensions = {f.kind: f.dimension for f in found.folds}
    # All weights by the same number is among both.
    assert dimensions["written_mean"] + dimensions["read_mean"] == (WIDTH + 1) + WIDTH - 1


@pytest.mark.parametrize("family", ["bert", "gpt2", "vit", "convnext"])
def test_a_score_is_the_same_whatever_the_means(family: str) -> None:
    model = tiny.build(family).double().eval()
    before, after = scores_along(model, synthetic(model, tokens=9), "read_mean")
    assert after[0] == pytest.approx(before[0], rel=1e-7)
    assert family == "convnext" or abs(after[1] / before[1] - 1) > 1e-3
