"""Timing and fitting: what is paired with what, and exponents of synthetic data."""

from __future__ import annotations

import math
import time

import pytest
import torch
from scipy.stats import linregress

from benchmarks import clock
from benchmarks.clock import Job


def test_an_exact_power_gives_its_exponent_and_no_error() -> None:
    found = clock.fit({x: 3.5 * x**1.7 for x in (2, 4, 8, 64)})
    assert found["exponent"] == pytest.approx(1.7, abs=1e-12)
    assert found["stderr"] == pytest.approx(0, abs=1e-12)


def test_a_noisy_power_gives_what_scipy_gives() -> None:
    generator = torch.Generator().manual_seed(0)
    points = {x: x**0.8 * math.exp(0.1 * float(torch.randn((), generator=generator))) for x in (1, 2, 3, 5, 8, 13)}
    found = clock.fit(points)
    theirs = linregress([math.log(x) for x in points], [math.log(y) for y in points.values()])
    assert found["exponent"] == pytest.approx(theirs.slope, rel=1e-9)
    assert found["stderr"] == pytest.approx(theirs.stderr, rel=1e-9)


@pytest.mark.parametrize("points", [{1: 1.0, 2: 2.0}, {1: 1.0, 2: 0.0, 4: 1.0}, {0: 1.0, 1: 1.0, 2: 1.0}])
def test_what_has_no_exponent_is_refused(points: dict[float, float]) -> None:
    with pytest.raises(ValueError, match="exponent"):
        clock.fit(points)


def test_a_spread_is_median_least_and_most() -> None:
    assert clock.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "low": 1.0, "high": 3.0, "repeats": 3}
    with pytest.raises(ValueError, match="no values"):
        clock.spread([])


def test_jobs_are_told_in_units_and_slow_ones_run_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def takes(duration: float, value: str = "") -> str:
        now[0] += duration
        return value

    jobs = [Job("three", lambda: takes(1.5, "a")), Job("ten", lambda: takes(5.0, "b"), every=2)]
    found = clock.paired(lambda: takes(0.5), jobs, repeats=3)
    assert [s.units for s in found["three"]] == pytest.approx([3.0] * 3)
    assert [s.units for s in found["ten"]] == pytest.approx([10.0] * 2)
    assert [(s.repeat, s.value) for s in found["ten"]] == [(0, "b"), (2, "b")]
    assert clock.ratios(found["ten"], found["three"]) == pytest.approx([5 / 1.5] * 2)


def test_rounding_reaches_into_lists_and_dicts_and_leaves_the_rest() -> None:
    assert clock.rounded({"a": [1.23456789, 7], "b": ("x", None, True)}, 3) == {"a": [1.23, 7], "b": ["x", None, True]}
