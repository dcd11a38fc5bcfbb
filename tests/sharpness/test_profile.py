"""What lies on the way to the worst perturbation: the geodesic, and the straight line beside it."""

from __future__ import annotations

import json

import pytest
import torch

from hf_geosharp import SharpnessResult, score
from hf_geosharp.sharpness.borrow import borrow
from hf_geosharp.sharpness.chart import Chart, Geometry
from hf_geosharp.symmetry.find import find_symmetries
from tests.sharpness.tiny import bert, bert_batches


def test_it_leads_from_nothing_to_the_value_of_the_first_batch() -> None:
    model, batches = bert().double(), bert_batches(2)
    plain = score(model, batches, rho=[0.02, 0.01], steps=6, reproducibility=False)
    result = score(model, batches, rho=[0.02, 0.01], steps=6, reproducibility=False, profile=True)
    way = result.profile
    assert way is not None
    assert way.t == pytest.approx([i / 10 for i in range(11)])
    assert way.radius == 0.02
    assert way.geodesic[0] == way.straight[0] == 0.0
    assert way.geodesic[-1] == pytest.approx(result.per_batch[0].value, rel=1e-9)
    # To first order the two are one; what is left grows with the square.
    apart = [abs(a - b) for a, b in zip(way.geodesic, way.straight, strict=True)]
    assert apart[10] / apart[5] == pytest.approx(4, rel=0.15)
    # It costs the score nothing that is counted, and changes nothing of it.
    assert result.to_dict() | {"profile": None, "seconds": 0} == plain.to_dict() | {"seconds": 0}
    assert SharpnessResult.from_dict(json.loads(result.to_json())) == result


def test_of_first_order_geodesics_the_two_are_one() -> None:
    way = score(
        bert().double(), bert_batches(1), geodesic="first", steps=4, reproducibility=False, profile=True
    ).profile
    assert way is not None
    assert way.geodesic == way.straight


@pytest.mark.parametrize("metric", ["inv", "mix"])
def test_the_straight_line_is_straight_and_leaves_in_the_direction_of_the_geodesic(metric: str) -> None:
    model, batch = bert().double(), bert_batches(1)[0]
    with borrow(model) as borrowed:
        chart = Chart(borrowed, find_symmetries(model, batch), Geometry(metric, "exact"))

        def weights(scale: float, straight: bool) -> torch.Tensor:
            u = chart.space.random(torch.Generator().manual_seed(0)).mul_(scale)
            chart.write(u, "first" if straight else None)
            return torch.cat([leaf.tensor.reshape(-1) for leaf in borrowed.leaves.values()])

        base, half, whole = (weights(scale, True) for scale in (0.0, 0.005, 0.01))
        assert torch.allclose(whole - base, 2 * (half - base), rtol=0, atol=1e-12)
        bend = [float((weights(s, False) - weights(s, True)).norm()) for s in (1e-3, 1e-2)]
    assert bend[1] / bend[0] == pytest.approx(100, rel=0.1)
