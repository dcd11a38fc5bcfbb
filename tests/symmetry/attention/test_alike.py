"""Layers that are alike are searched once, and what is found is what a search of each would find."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks import tiny
from hf_geosharp.symmetry import SymmetryMap, find_symmetries
from hf_geosharp.symmetry.attention import sites
from hf_geosharp.symmetry.attention.sites import Attention, attentions
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.tracing.features import Families
from hf_geosharp.symmetry.tracing.trace import differentiable, trace
from tests.families import build

LAYERS = 4

DEEP = ("bert", "llama", "t5", "gpt2", "qwen3", "smollm3", "gemma3_text", "albert", "swin", "persimmon")
"""Types with several layers: all alike, of two kinds, sharing their weights, of different widths."""


def seen(model: nn.Module) -> list[Attention]:
    batch = synthetic(model, tokens=19)
    with torch.enable_grad(), differentiable(model):
        return list(attentions(trace(model, batch), Families()))


def found(model: nn.Module) -> SymmetryMap:
    return find_symmetries(model, synthetic(model, tokens=19), cached=False, prove=False)


@pytest.mark.parametrize("name", [n if n in DEEP[:3] else pytest.param(n, marks=pytest.mark.slow) for n in DEEP])
def test_what_is_carried_over_is_what_each_search_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.build(name)
    once = found(model)
    monkeypatch.setattr(sites, "portrait", lambda *_: None)
    assert found(model) == once


def test_layers_alike_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    search = sites.couplings

    def counted(*args: object) -> object:
        searched.append(args)
        return search(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(sites, "couplings", counted)
    first, *others = seen(tiny.build("llama", num_hidden_layers=LAYERS))
    assert len(searched) == 2  # queries and keys, values and output
    assert len(others) == LAYERS - 1
    assert first.like is None
    assert all(a.like is first for a in others)
    assert others[0].renamed["layers.0.self_attn.q_proj.weight"] == "layers.1.self_attn.q_proj.weight"


def test_what_a_layer_norm_takes_out_does_not_tell_layers_apart() -> None:
    """The means of queries and keys are kept for the way back: they are other numbers in each layer."""
    first, *others = seen(tiny.build("persimmon", num_hidden_layers=LAYERS))
    assert len(others) == LAYERS - 1
    assert all(a.like is first for a in others)


def test_layers_without_rotation_are_not_like_those_with_it() -> None:
    model = tiny.build("smollm3", num_hidden_layers=LAYERS, no_rope_layers=[1, 0, 1, 0])
    with_rotation, without, *others = seen(model)
    assert without.like is None
    assert [a.like for a in others] == [with_rotation, without]


def test_constants_that_differ_tell_layers_apart() -> None:
    """The same operations on tables of other signs: what is turned in one layer stands still in the next."""

    class Layer(nn.Module):
        def __init__(self, turned: int) -> None:
            super().__init__()
            self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False).double() for _ in range(4))
            angles = torch.arange(5.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.05]).double()
            self.angles = torch.cat(2 * [angles * (torch.arange(4) < turned)], -1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def turn(y: torch.Tensor) -> torch.Tensor:
                a, b = y.chunk(2, -1)
                return y * self.angles.cos() + torch.cat([-b, a], -1) * self.angles.sin()

            logits = turn(self.q(x)) @ turn(self.k(x)).mT
            return x + self.o(torch.softmax(logits, -1) @ self.v(x))  # type: ignore[no-any-return]

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(Layer(4), Layer(4), Layer(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    model, batch = Layers(), {"x": torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)).double()}
    with torch.enable_grad(), differentiable(model):
        first, second, third = attentions(trace(model, batch), Families())
    assert second.like is first
    assert third.like is None


def test_a_function_whose_workings_do_not_show_is_searched_for_itself() -> None:
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return 2 * grad

    model = build("llama")
    attention = model.model.layers[1].self_attn.q_proj  # type: ignore[union-attr, index]
    attention.register_forward_hook(lambda _m, _a, y: Own.apply(y))  # type: ignore[no-untyped-call]
    assert [a.like is None for a in seen(model)] == [True, True]
