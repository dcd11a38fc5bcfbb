"""The orbit experiment: what moves a model leaves its function, and the page is that of the data."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import orbit
from tests.sharpness.tiny import bert, bert_batches

ROOT = Path(__file__).resolve().parents[2]


def rows() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((ROOT / "benchmarks" / "data" / "orbit.json").read_text(encoding="utf-8"))
    return found


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(3, 2, generator=generator, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: Tensor, y: Tensor) -> SimpleNamespace:
        return SimpleNamespace(loss=((x @ self.w).tanh().sum(1) - y).square().mean())


def test_the_power_iteration_finds_the_top_of_the_whole_hessian() -> None:
    generator = torch.Generator().manual_seed(1)
    batch = {n: torch.randn(*s, generator=generator, dtype=torch.float64) for n, s in (("x", (7, 3)), ("y", (7,)))}
    model = Small()

    def loss(w: Tensor) -> Tensor:
        return ((batch["x"] @ w.view(3, 2)).tanh().sum(1) - batch["y"]).square().mean()

    values = torch.linalg.eigvalsh(torch.autograd.functional.hessian(loss, model.w.detach().flatten()))
    top = float(values[values.abs().argmax()])
    value, residual = orbit.top_eigenvalue(model, batch, 500)
    assert value == pytest.approx(top, rel=1e-9)
    assert residual < 1e-6


@pytest.mark.parametrize(("scale", "condition"), [(1.0, 1.0), (0.01, 1.0), (100.0, 1.0), (1.0, 1000.0)])
def test_a_moved_model_computes_the_same(scale: float, condition: float) -> None:
    model, batch = bert().double(), bert_batches(1)[0]
    before = model(**batch).logits.detach()
    norm, gradient = orbit.weight_norm(model), orbit.gradient_norm(model, batch)
    orbit.moved(model, scale, condition)
    torch.testing.assert_close(model(**batch).logits.detach(), before, rtol=1e-9, atol=1e-9)
    if (scale, condition) == (1.0, 1.0):
        assert orbit.weight_norm(model) == pytest.approx(norm, rel=1e-12)
        assert orbit.gradient_norm(model, batch) == pytest.approx(gradient, rel=1e-9)
    else:
        assert orbit.weight_norm(model) > 1.1 * norm


def test_the_page_is_made_of_the_data() -> None:
    assert (ROOT / "benchmarks" / "ORBIT.md").read_text(encoding="utf-8") == orbit.page(rows())


def test_the_data_say_what_the_page_says_of_them() -> None:
    table = {(r["demo"], r["move"]): r for r in orbit.ratios(rows())}
    assert set(table) == {(demo, move) for demo in orbit.DEMOS for move in orbit.MOVES}
    for demo in orbit.DEMOS:
        own = {move: r for (name, move), r in table.items() if name == demo}
        assert all(abs(r[name] - 1) < 1e-6 for r in own.values() for name in orbit.INVARIANT)
        plain = ("Euclidean", *orbit.PLAIN)
        # The eigenvalue is that of an iteration.
        assert all(abs(own[1.0, 1.0][name] - 1) < 1e-2 for name in plain)
        assert all(own[c, 1.0][name] > 1 for c in (0.01, 100.0) for name in plain)
        turned = own[1.0, 1.0]["adaptive"]
        assert abs(turned - 1) > 1e-3
        assert all(abs(own[c, 1.0]["adaptive"] / turned - 1) < 1e-3 for c in orbit.SCALES)
        last = own[1.0, orbit.CONDITIONS[-1]]
        assert last["adaptive"] == max(last[name] for name in orbit.MEASURES)
