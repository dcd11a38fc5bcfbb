"""Scores along approximate geodesics are held against the exact one, where they found the most."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from hf_geosharp import SharpnessResult, score, score_pretrained
from hf_geosharp.geometry.integration import EndlessError
from hf_geosharp.sharpness.ball import Ball
from tests.sharpness.tiny import bert, bert_batches

FAR = (
    r"the (first|second)-order geodesic is not close to the exact one at rho ([\d.]+)"
    r".*rises by (\S+) along it, by (\S+)"
)


def of_demo(name: str = "digits-vit", **options: Any) -> SharpnessResult:
    return score_pretrained(f"demo:{name}", samples=128, **options)


def far(result: SharpnessResult) -> list[tuple[str, float, float, float]]:
    """Order, radius, and the two rises, of each warning."""
    found = [m.groups() for text in result.warnings if (m := re.search(FAR, text))]
    return [(order, float(rho), float(rise), float(exact)) for order, rho, rise, exact in found]


def test_a_ball_in_which_the_second_order_is_not_enough_is_told_at_its_radius() -> None:
    result = of_demo(metric="mix", rho=[0.001, 0.01], geodesic="second")
    ((order, rho, rise, exact),) = far(result)
    assert (order, rho) == ("second", 0.01)
    assert rise == pytest.approx(result.curve[1].geodesic_sharpness, rel=0.05)
    # Not the exact score: that is the largest rise along exact geodesics, which lies elsewhere.
    largest = of_demo(metric="mix", rho=0.01)
    assert largest.geodesic == "exact"
    assert exact < largest.geodesic_sharpness < rise
    assert not far(largest)


@pytest.mark.parametrize("demo", ["digits-vit", "vader-bert"])
@pytest.mark.parametrize("geodesic", ["first", "second"])
def test_relative_changes_have_geodesics_that_are_nearly_straight(geodesic: Any, demo: str) -> None:
    rho = [0.1, 0.3] if geodesic == "second" else [0.1]
    result = of_demo(demo, metric="inv", geodesic=geodesic, rho=rho)
    assert not far(result)
    exact = of_demo(demo, metric="inv", geodesic="exact", rho=rho)
    for point, other in zip(result.curve, exact.curve, strict=True):
        assert point.geodesic_sharpness == pytest.approx(other.geodesic_sharpness, rel=0.01)


def test_it_costs_the_score_nothing_and_is_left_out_where_nothing_is_run_again() -> None:
    with_check, without = (
        score(
            bert().double(), bert_batches(1), metric="mix", geodesic="second", rho=3.0, steps=3, reproducibility=again
        )
        for again in (True, False)
    )
    assert with_check.passes == without.passes
    assert with_check.geodesic_sharpness == without.geodesic_sharpness
    assert far(with_check)
    assert not far(without)


def test_an_exact_geodesic_that_has_no_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_end(self: Ball, *_: Any) -> float | None:
        raise EndlessError([0], 0.5)

    monkeypatch.setattr(Ball, "exact", without_end)
    model = bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (text,) = score(model, bert_batches(1), steps=2).warnings
    assert "along it, and the exact one has no end there" in text
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
