"""Diagonal networks: closed forms, correlations and the run against oracles; the page against its data."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import diagonal
from benchmarks.diagonal import Ball, Data
from hf_geosharp.geometry.metrics import METRICS, Order
from hf_geosharp.geometry.space import Tangent
from hf_geosharp.sharpness.choices import GEODESICS

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"width": 8, "sparse": 2, "samples": 5}
CASES = [(metric, order) for metric in diagonal.METRICS for order in GEODESICS]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def small(seed: int = 0) -> tuple[Data, torch.Tensor, torch.Tensor]:
    """Data and factors whose products are not near 0."""
    data = Data.sample(seed, **SMALL)
    u, v = (draw(8, seed=seed + k).sign() * (0.5 + draw(8, seed=seed + k + 9).abs()) for k in (1, 2))
    return data, u, v


def result() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "data" / "diagonal.json").read_text(encoding="utf-8"))
    return found


# ---------------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("metric", ["inv", "mix"])
@pytest.mark.parametrize("order", GEODESICS)
def test_end_point_and_length_are_those_of_the_packages_pairs(metric: str, order: Order) -> None:
    _, u, v = small()
    b = 0.2 * draw(8, seed=5).tanh()
    pair = u.view(-1, 1, 1), v.view(-1, 1, 1)
    velocity = tuple(x * b.view(-1, 1, 1) for x in pair)
    g, h = METRICS[metric].geodesic(pair, velocity, order)
    expected = (g * h).flatten() / (u * v)
    torch.testing.assert_close(diagonal.product(metric, order, b)[0], expected, rtol=1e-9, atol=1e-9)
    size = Ball(small()[0], u * v, metric, order).size
    torch.testing.assert_close((size * b).abs(), METRICS[metric].norm(pair, velocity), rtol=1e-12, atol=0)


@pytest.mark.parametrize("order", GEODESICS)
def test_an_adaptive_end_point_is_the_packages(order: Order) -> None:
    theta, b = draw(1, 6), draw(1, 6, seed=1)
    end = METRICS["adaptive"].geodesic((theta,), (theta * b,), order)[0]
    torch.testing.assert_close(theta * diagonal.entry(order, b)[0], end)


@pytest.mark.parametrize(("metric", "order"), CASES)
def test_the_gradient_is_that_of_the_rise(metric: str, order: str) -> None:
    data, u, v = small()
    ball = Ball(data, u * v, metric, order)
    z = (0.1 * draw(len(ball.size), seed=3)).requires_grad_()
    rise = ball.rises(z)
    (expected,) = torch.autograd.grad(rise, z)
    loss, gradient = ball.evaluate(Tangent((z.detach(),)), True)
    assert loss == pytest.approx(float(rise.detach() + data.loss(u * v)), rel=1e-12)
    assert gradient is not None
    torch.testing.assert_close(gradient.pieces[0], expected)


@pytest.mark.parametrize(("metric", "order"), [case for case in CASES if case != ("mix", "exact")])
def test_the_ascent_is_the_same_through_the_packages_map_of_a_model(metric: str, order: str) -> None:
    data, u, v = small(4)
    radii = [0.02, 0.1]
    alone = [a for a, _ in diagonal.climbs(Ball(data, u * v, metric, order), radii)]
    assert diagonal.by_chart({"u": u, "v": v}, data, metric, order, radii) == pytest.approx(alone, rel=1e-9)


@pytest.mark.parametrize(("metric", "order"), CASES)
def test_the_best_known_is_the_dense_maximum_and_never_below_the_ascent(metric: str, order: str) -> None:
    data, u, v = small(2)
    ball = Ball(data, u * v, metric, order)
    for alone, best in diagonal.climbs(ball, [0.05, 0.3]):
        assert alone <= best
    assert best == pytest.approx(diagonal.dense(ball, 0.3), rel=5e-3)


def test_exact_mix_is_the_maximum_of_a_quadratic() -> None:
    data, u, v = small(3)
    ball = Ball(data, u * v, "mix", "exact")
    for rho in (0.01, 0.3, 2.0):
        value = diagonal.exact_mix(data, u * v, rho)
        assert value == pytest.approx(diagonal.dense(ball, rho), rel=1e-6)


def test_one_pair_and_one_sample_have_the_papers_closed_form() -> None:
    data = Data(torch.tensor([[1.5]]).double(), torch.tensor([2.0]).double(), torch.tensor([0.0]).double())
    u, v, rho = torch.tensor([0.7]).double(), torch.tensor([-0.4]).double(), 0.3
    out = float(u * v) * 1.5
    grid = torch.linspace(-rho, rho, 20001, dtype=torch.float64) / math.sqrt(2)
    expected = (out**2 * (torch.exp(4 * grid) - 1) - 2 * 2.0 * out * (torch.exp(2 * grid) - 1)).max() / 2
    z = (grid * math.sqrt(2))[:, None]
    assert float(Ball(data, u * v, "inv", "exact").rises(z).max()) == pytest.approx(float(expected), rel=1e-12)


def test_exact_adaptive_and_exact_inv_are_one_measure() -> None:
    data, u, v = small(6)
    values = [diagonal.dense(Ball(data, u * v, metric, "exact"), 0.4) for metric in ("adaptive", "inv")]
    assert values[0] == pytest.approx(values[1], rel=1e-6)


def test_the_test_loss_is_the_mean_over_all_inputs() -> None:
    data, u, v = small()
    fresh = draw(200_000, 8, seed=8)
    sampled = Data(fresh, fresh @ data.target, data.target).loss(u * v)
    assert float(data.test_loss(u * v)) == pytest.approx(float(sampled), rel=0.02)


# ----------------------------------------------------------------------------------------------------- correlation


@pytest.mark.parametrize(
    ("x", "y", "expected"),
    [
        ([1, 2, 3], [1, 3, 2], 1 / 3), ([1, 1, 2], [1, 2, 3], 2 / 3), ([1, 2, 3, 4], [4, 3, 2, 1], -1),
        ([1, 1], [1, 2], 0),
    ],
)  # fmt: skip
def test_tau_a_by_hand(x: list[float], y: list[float], expected: float) -> None:
    assert diagonal.tau_a(x, y) == pytest.approx(expected)


def test_tau_a_counts_pairs() -> None:
    x, y = draw(9).round(decimals=1).tolist(), draw(9, seed=1).tolist()
    pairs = list(combinations(range(9), 2))
    score = sum(((x[i] > x[j]) - (x[i] < x[j])) * ((y[i] > y[j]) - (y[i] < y[j])) for i, j in pairs)
    assert diagonal.tau_a(x, y) == pytest.approx(score / len(pairs))


def test_the_bootstrap_leaves_a_perfect_order_perfect_and_is_the_same_each_time() -> None:
    x = list(range(12))
    assert diagonal.bootstrap([diagonal.agreement(x, x)]) == (1.0, 1.0)
    noisy = diagonal.agreement(x, draw(12).tolist())
    low, high = diagonal.bootstrap([noisy, noisy])
    assert (low, high) == diagonal.bootstrap([noisy, noisy])
    assert low < float(noisy.sum()) / 132 < high


# ------------------------------------------------------------------------------------------------------------- run


@pytest.mark.slow
def test_networks_that_do_not_reach_the_loss_are_counted_and_left_out() -> None:
    row = diagonal.one_seed(0, [(1.0, 0.02), (0.8, 0.03), (0.6, 0.06), (0.02, 0.02), (1.0, 5.0)], budget=3000)
    assert row["counts"] == {"trained": 5, "reached": 3, "diverged": 1, "too slow": 1}
    assert len(row["nets"]) == 3
    for net in row["nets"]:
        assert net["train_loss"] <= diagonal.LOSS < net["test_loss"]
        for key, values in net["sharpness"].items():
            assert len(values) == len(diagonal.RADII[key.split()[0]])
            best = [value for _, value in values]
            assert 0 < best[0] < best[-1]
            assert best == sorted(best)
            assert all(alone <= value for alone, value in values)
    json.dumps(row)
    diagonal.summary([{**row, "check": []}])


def test_the_page_is_made_of_the_data() -> None:
    assert (ROOT / "benchmarks" / "DIAGONAL.md").read_text(encoding="utf-8") == diagonal.page(result())


def test_the_data_are_of_the_settings_in_the_script() -> None:
    found = result()
    assert found["setting"] == diagonal.setting()
    assert len(found["cells"]) == 3 * sum(len(radii) for radii in diagonal.RADII.values())
    assert len(found["counts"]) == len(found["useful"]) >= 7
    assert all(c["reached"] >= 45 for c in found["counts"])
