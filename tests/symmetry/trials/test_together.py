"""Symmetries that are tried together: the same are found as one by one, in a number of runs that does not grow."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from benchmarks import tiny
from hf_geosharp.symmetry import find_symmetries
from hf_geosharp.symmetry.groups import Group
from hf_geosharp.symmetry.inputs import synthetic
from hf_geosharp.symmetry.pairs import Pair
from hf_geosharp.symmetry.scales import Scale
from hf_geosharp.symmetry.trials import probe
from hf_geosharp.symmetry.trials.probe import LocalTwin, Trials
from hf_geosharp.symmetry.trials.together import Together, least_control
from hf_geosharp.symmetry.views import View
from tests.symmetry.handmade import WIDTH, Residual, inputs

UNITS, COUNT = 6, 4


class Stack(nn.Module):
    """Experts in 3-D parameters, all of which get tokens; some are cut off, or not listened to."""

    def __init__(self, limited: tuple[int, ...] = (), silent: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.limited, self.silent = limited, silent
        self.up = nn.Parameter(torch.zeros(COUNT, UNITS, WIDTH))
        self.down = nn.Parameter(torch.zeros(COUNT, WIDTH, UNITS))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(COUNT):
            y = functional.relu(functional.linear(x[:, e::COUNT], self.up[e]))
            y = y.clamp(max=1e-3) if e in self.limited else y
            out[:, e::COUNT] = functional.linear(y, self.down[e]) * (e not in self.silent)
        return out


def claimed(module: nn.Module) -> set[int]:
    found = find_symmetries(Residual(module), inputs())
    assert {p.copies for p in found.pairs if p.kind == "mlp"} <= {UNITS}
    return {p.g[0].start[0] for p in found.pairs if p.kind == "mlp"}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"limited": (2,)}, {0, 1, 3}),
        ({"silent": (0,)}, {1, 2, 3}),
        ({"limited": (1, 2), "silent": (3,)}, {0}),
        ({"limited": (0, 1, 2, 3)}, set()),
    ],
    ids=str,
)
def test_what_holds_of_some_experts_alone_is_claimed_of_those(options: dict[str, Any], expected: set[int]) -> None:
    assert claimed(Stack(**options)) == expected


@pytest.mark.parametrize(
    "name", ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text", "granitemoe", "jamba", "dbrx"]
)
def test_the_same_is_found_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name not in CONFIG_MAPPING:
        pytest.skip("this transformers does not know it")
    model = tiny.build(name)
    batch = synthetic(model, tokens=5)
    together = find_symmetries(model, batch, prove=False)
    monkeypatch.setattr(Trials, "at_once", lambda *_: None)
    assert find_symmetries(model, batch, prove=False) == together


@pytest.mark.parametrize("largest", [1, probe.DIFFERENTIATED])
def test_modules_too_large_to_be_differentiated_are_tried_one_by_one(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, graphs = LocalTwin.run, [False]

    def noted(self: LocalTwin, weights: Any, scale: float = 1.0, graph: bool = False) -> list[Tensor]:
        graphs.append(graph)
        return run(self, weights, scale, graph)

    monkeypatch.setattr(LocalTwin, "run", noted)
    monkeypatch.setattr(probe, "DIFFERENTIATED", largest)
    assert claimed(Stack()) == {0, 1, 2, 3}
    assert any(graphs) == (largest > 1)


def test_more_experts_take_no_more_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    run, runs = LocalTwin.run, [0]

    def counted(*args: Any, **kwargs: Any) -> list[Tensor]:
        runs[-1] += 1
        return run(*args, **kwargs)

    monkeypatch.setattr(LocalTwin, "run", counted)
    for experts in (4, 24):
        config = AutoConfig.for_model(
            "mixtral", vocab_size=20, hidden_size=16, intermediate_size=8, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_local_experts=experts,
        )  # fmt: skip
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        found = find_symmetries(model, synthetic(model, tokens=60), prove=False)
        assert sum(p.kind == "mlp" for p in found.pairs) == experts
        runs.append(0)
    # A few that no token reached are tried at once as well.
    assert runs[1] <= runs[0] + 10


def _members() -> tuple[Pair | Scale, ...]:
    def view(name: str, out: str) -> View:
        return View.pattern(name, (("u",), "r") if out else ("r", ("u",)), {"u": 2, "r": 3}, ("u",), (), ("r",))

    pairs = [Pair("", "mlp", "", Group(1), (view(f"{n}.g", "out"),), (view(f"{n}.h", ""),)) for n in "ab"]
    return (*pairs, Scale("", "mlp", "", (view("c.g", "out"),), (view("c.h", ""),), 2))


def test_each_moves_by_an_element_of_its_own_and_back() -> None:
    together = Together("", "mlp", "", _members())
    generator = torch.Generator().manual_seed(0)
    shapes = {"g": (2, 3), "h": (3, 2)}
    weights = {
        name: torch.randn(shapes[name[-1]], generator=generator, dtype=torch.float64) for name in together.parameters
    }
    assert together.parameters == ("a.g", "a.h", "b.g", "b.h", "c.g", "c.h")
    assert together.dimension == 6
    move = together.random(weights, generator, 10.0)
    assert len({float(x.flatten()[0]) for x in move.values()}) == 3
    moved = {name: w.clone() for name, w in weights.items()}
    together.apply(moved, move)
    for name in "ab":
        torch.testing.assert_close(moved[f"{name}.h"] @ moved[f"{name}.g"], weights[f"{name}.h"] @ weights[f"{name}.g"])
    together.apply(moved, together.inverse(move))
    torch.testing.assert_close(moved, weights)


def test_the_least_control_is_that_of_the_member_that_shows_least() -> None:
    together = Together("", "mlp", "", _members())
    weights = {n: torch.ones((2, 3) if n[-1] == "g" else (3, 2), dtype=torch.float64) for n in together.parameters}
    broken = {name: w.clone() for name, w in weights.items()}
    together.break_(broken, together.random(weights, torch.Generator().manual_seed(0), 10.0))
    change = {n: broken[n] - weights[n] for n in weights}
    for share in (1.0, 1e-9, 0.0):
        leaves = {n: w.clone().requires_grad_() for n, w in weights.items()}
        x = torch.randn(3, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        y = (
            leaves["a.h"] @ leaves["a.g"] @ x
            + share * leaves["b.g"].sum() * x.sin()
            + leaves["c.g"].T @ leaves["c.g"] @ x
        )
        least = least_control(together, [y], leaves, change)
        assert (least == 0) == (share == 0)
        assert share <= 1e-9 or least > 1e-3
        assert share != 1e-9 or 1e-12 < least < 1e-7
    assert least_control(together, [y.detach()], leaves, change) == 0.0
