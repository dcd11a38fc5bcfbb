"""Variants of the score for ablations: equal to the package's where they have to be, and different where they do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from benchmarks.zoo import training, variants
from benchmarks.zoo.data import Data
from hf_geosharp import score
from hf_geosharp.geometry.metrics import PAIR_METRICS, Order
from hf_geosharp.scoring import make_twin

METRICS = ("inv", "mix")
RHO = {"inv": 0.1, "mix": 0.03}


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    batch = {
        "pixel_values": torch.randn(16, 1, 28, 28, generator=generator),
        "labels": torch.randint(2, (16,), generator=generator),
    }
    torch.manual_seed(0)
    return training.build(Data(batch, batch, {}, classes=2), 0.0).eval(), batch


def take(
    model: nn.Module, batch: dict[str, Tensor], metric: str, *, geodesic: Order = "second", damping: float = 0.0,
    average: bool = False,
) -> float:  # fmt: skip
    return score(
        model, [batch], metric=metric, geodesic=geodesic, rho=RHO[metric], damping=damping, average=average, steps=8,
        reproducibility=False, verify=False,
    ).geodesic_sharpness  # fmt: skip


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("geodesic", ["first", "second"])
def test_hardly_damped_as_stored_is_the_score_itself(
    subject: tuple[nn.Module, dict[str, Tensor]], metric: str, geodesic: Order
) -> None:
    model, batch = subject
    usual = take(model, batch, metric, geodesic=geodesic)
    with variants.stored_gauge():
        found = take(model, batch, metric, geodesic=geodesic, damping=1e-9)
    assert found == pytest.approx(usual, rel=1e-3)


@pytest.mark.parametrize("metric", METRICS)
def test_damping_as_stored_sees_the_gauge_and_the_packages_does_not(
    subject: tuple[nn.Module, dict[str, Tensor]], metric: str
) -> None:
    model, batch = subject
    twin = copy.deepcopy(model)
    make_twin(twin)
    assert take(twin, batch, metric, damping=0.1) == pytest.approx(take(model, batch, metric, damping=0.1), rel=1e-3)
    with variants.stored_gauge():
        here, there = (take(m, batch, metric, damping=0.1) for m in (model, twin))
    assert there != pytest.approx(here, rel=1e-2)


@pytest.mark.parametrize("metric", METRICS)
def test_the_worst_case_along_exact_geodesics_does_not_need_the_projection(
    subject: tuple[nn.Module, dict[str, Tensor]], metric: str
) -> None:
    # A quotient never lengthens a curve: what any geodesic reaches a horizontal one reaches that is no longer.
    model, batch = subject
    usual = take(model, batch, metric, geodesic="exact")
    with variants.no_projection():
        assert take(model, batch, metric, geodesic="exact") == pytest.approx(usual, rel=1e-2)


@pytest.mark.parametrize("metric", METRICS)
def test_without_projection_random_directions_lie_along_the_orbits_too(metric: str) -> None:
    generator = torch.Generator().manual_seed(0)
    g, h = (torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (6, 5))
    frame = PAIR_METRICS[metric].at(g, h)
    u = tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (g, h))
    before = frame.horizontal(u)
    with variants.no_projection():
        assert frame.dimension == 2 * (6 + 5) * 3
        assert all(torch.equal(x, y) for x, y in zip(frame.horizontal(u), u, strict=True))
    assert frame.dimension == 2 * ((6 + 5) * 3 - 3 * 3)
    assert all(torch.equal(x, y) for x, y in zip(frame.horizontal(u), before, strict=True))


@pytest.mark.parametrize("metric", METRICS)
def test_the_frame_as_stored_is_that_of_its_metric(metric: str) -> None:
    generator = torch.Generator().manual_seed(1)
    g, h = (torch.randn(2, n, 3, generator=generator, dtype=torch.float64) for n in (6, 5))
    frame = variants.StoredFrame(metric, g, h, 0.0, torch.float64)
    other = PAIR_METRICS[metric]
    u = tuple(torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (g, h))
    xi = frame.vector(u)
    length = sum(x.square().flatten(1).sum(1) for x in u)
    assert torch.allclose(other.inner((g, h), xi, xi), length)
    assert all(torch.allclose(x, y) for x, y in zip(frame.coordinates(xi), u, strict=True))
    flat = other.horizontal((g, h), xi)
    assert all(torch.allclose(x, y) for x, y in zip(frame.vector(frame.horizontal(u)), flat, strict=True))
    assert frame.dimension == other.at(g, h).dimension
    ends = other.geodesic((g, h), xi, "second")
    assert all(torch.allclose(x, y) for x, y in zip(frame.geodesic(u, "second").point, ends, strict=True))


def test_exact_geodesics_damped_as_stored_are_refused() -> None:
    g = torch.randn(1, 4, 2, generator=torch.Generator().manual_seed(2))
    frame = variants.StoredFrame("inv", g.double(), g.double(), 0.1, torch.float64)
    with pytest.raises(NotImplementedError, match="exact"):
        frame.geodesic((g.double(), g.double()), "exact")
