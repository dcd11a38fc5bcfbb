"""The published baseline, written anew: its passes, its ball, its value on quadratics; the model comes back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks import baseline
from benchmarks.baseline import Found, worst_case
from hf_geosharp.sharpness.choices import ASCENTS
from hf_geosharp.sharpness.estimate import estimate
from hf_geosharp.sharpness.settings import Settings
from tests.sharpness.tiny import bert, bert_batches

EMPTY: dict[str, Tensor] = {"x": torch.zeros(1, 1)}
SETTINGS: dict[str, Any] = {"metric": "adaptive", "reproducibility": False, "verify": False}


class Quadratic(nn.Module):
    """g·δ + ½ δᵀ H δ with δ = w - w₀, in two parameters."""

    def __init__(self, weights: Tensor, hessian: Tensor, slope: Tensor) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(part.clone()) for part in (weights[:2], weights[2:]))
        self.start, self.hessian, self.slope = weights.clone(), hessian, slope

    def forward(self, x: Tensor) -> SimpleNamespace:
        delta = torch.cat([self.a, self.b]) - self.start
        return SimpleNamespace(loss=self.slope @ delta + delta @ self.hessian @ delta / 2 + x.sum())


def quadratic(seed: int, weights: Tensor | None = None) -> Quadratic:
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(5, 5, generator=generator, dtype=torch.float64)
    slope = torch.randn(5, generator=generator, dtype=torch.float64)
    signs = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0], dtype=torch.float64)
    return Quadratic(signs if weights is None else weights, matrix + matrix.mT, slope)


def maximum(model: Quadratic, rho: float) -> float:
    """Of the quadratic in the ball ‖δ / w‖ <= ρ: on its sphere, (λ - H) δ = g with λ above the eigenvalues."""
    size = model.start.abs()
    hessian, slope = size[:, None] * model.hessian * size, size * model.slope
    values, axes = torch.linalg.eigh(hessian)
    along = axes.mT @ slope
    low, high = float(values[-1].clamp(min=0)), float(values[-1].abs() + along.norm() / rho) + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if float((along / (middle - values)).norm()) > rho else (low, middle)
    z = along / (high - values)
    return float(along @ z + (values * z) @ z / 2)


def test_the_checkpoints_are_the_published_ones() -> None:
    assert baseline.checkpoints(20) == [5, 9, 12, 15, 16, 18, 19, 20]


@pytest.mark.parametrize(("steps", "forwards", "backwards"), [(20, 41, 20), (3, 7, 3)])
def test_its_passes(steps: int, forwards: int, backwards: int) -> None:
    found = worst_case(quadratic(0), EMPTY, 0.1, steps)
    assert (found.forwards, found.backwards) == (forwards, backwards)


def test_a_first_step_by_hand() -> None:
    """Along |w| g, 2 ρ long by the plain norm of g; the nearest point of the ball; 3/4 of it, as the last one is 0."""
    weights, none = torch.tensor([2.0, 1.0, 1.0, 1.0, 1.0], dtype=torch.float64), torch.zeros(5, 5, dtype=torch.float64)
    model = Quadratic(weights, none, torch.eye(5, dtype=torch.float64)[0])
    found = worst_case(model, EMPTY, 0.1, 1)
    # The step is 2 · 0.1 · 2 = 0.4 in a coordinate of size 2, which the ball ends at 0.2.
    assert found.rise == pytest.approx(0.75 * 0.2, rel=1e-3)
    assert found.norm == pytest.approx(0.75 * 0.1, rel=1e-3)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ascent", ASCENTS)
def test_on_quadratics_it_and_ours_come_to_the_maximum(seed: int, ascent: str) -> None:
    model, rho = quadratic(seed), 0.3
    best = maximum(model, rho)
    theirs = worst_case(model, EMPTY, rho, 100)
    ours = estimate(model, [EMPTY], Settings(rho=(rho,), ascent=ascent, steps=100, **SETTINGS)).geodesic_sharpness
    assert ours == pytest.approx(best, rel=5e-3)
    assert theirs.rise == pytest.approx(ours, rel=2e-2)
    assert theirs.rise <= best * (1 + 1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_every_point_is_in_the_ball(seed: int) -> None:
    weights = torch.tensor([0.2, -3.0, 0.01, 1.0, 0.5], dtype=torch.float64)
    model = quadratic(seed, weights)
    found = worst_case(model, EMPTY, 0.3)
    assert found.norm <= found.largest <= 0.3 + 2 * baseline.NEAR
    assert found.rise <= maximum(model, 0.3) * (1 + 1e-3)


def test_the_projection_is_the_nearest_point() -> None:
    sizes = [torch.tensor([0.5, 2.0], dtype=torch.float64)]
    ascent = baseline._Ascent(nn.Linear(1, 1), EMPTY, sizes, 0.1, adaptive=True, guard=True)
    point = torch.tensor([0.3, 0.4], dtype=torch.float64)
    (near,) = ascent._nearest([point])
    angles = torch.linspace(0, 2 * torch.pi, 100001, dtype=torch.float64)
    edge = 0.1 * sizes[0] * torch.stack([angles.cos(), angles.sin()], dim=1)
    closest = edge[(edge - point).norm(dim=1).argmin()]
    torch.testing.assert_close(near, closest, atol=1e-4, rtol=0)
    inside = torch.tensor([0.01, 0.01], dtype=torch.float64)
    assert ascent._nearest([inside])[0] is inside


def test_a_zero_weight_switches_the_published_ball_off_and_not_the_guarded_one() -> None:
    model = quadratic(1, torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0], dtype=torch.float64))
    loose, tight = (worst_case(model, EMPTY, 0.1, guard=guard) for guard in (False, True))
    assert tight.largest <= 0.1 + 2 * baseline.NEAR
    assert loose.largest > 0.2
    assert loose.rise > 2 * tight.rise


def test_the_model_comes_back_and_the_best_of_its_evaluations_is_the_value(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = bert(), bert_batches(1)[0]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    losses: list[float] = []
    evaluate = baseline._Ascent._loss
    monkeypatch.setattr(baseline._Ascent, "_loss", lambda self: losses.append(evaluate(self)) or losses[-1])
    found = worst_case(model, batch, 0.1)
    assert isinstance(found, Found)
    assert len(losses) == 21
    assert found.rise == max(losses) - losses[0] > 0
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(ValueError, match="input_ids"):
        worst_case(model, {k: v for k, v in batch.items() if k != "input_ids"}, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
